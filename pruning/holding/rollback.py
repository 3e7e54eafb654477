"""Rollback: restore modules after a change that failed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pruning.holding.parameter import is_pruning_hook

_CHANGED_IN_PLACE = ("_parameters", "_buffers", "_forward_pre_hooks", "_flat_weights")
"""Attributes of a module that change when a parameter is pruned; `_flat_weights` is an RNN's own list."""


@contextmanager
def restored_on_error(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore names, masks and hooks of `modules`, and the attributes of their hooks, if the body raises."""
    kept = list(dict.fromkeys(modules))
    classes = [type(module) for module in kept]
    hooks = [hook for module in kept for hook in module._forward_pre_hooks.values() if is_pruning_hook(hook)]
    before = [(owner, dict(vars(owner)), _contents(owner)) for owner in (*kept, *hooks)]
    try:
        yield
    except BaseException:
        for owner, attributes, contents in before:
            vars(owner).clear()
            vars(owner).update(attributes)
            for container, items in contents:  # restored in place: other objects may hold the container
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(items)
        for module, kind in zip(kept, classes, strict=True):
            if type(module) is not kind:
                module.__class__ = kind
        raise


def _contents(owner: object) -> list[tuple[Any, Any]]:
    containers = [vars(owner)[name] for name in _CHANGED_IN_PLACE if name in vars(owner)]
    return [(container, container.copy()) for container in containers]
