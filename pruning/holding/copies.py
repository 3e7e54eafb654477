"""Fast copies of networks, several times as fast as `copy.deepcopy`, and restoration after a change that failed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from pruning.holding.parameter import is_pruning_hook

_PLAIN = frozenset({bool, int, float, str, type(None)})
_CONTAINERS = frozenset({dict, OrderedDict, list, set})
_HOW_COPIED = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__getnewargs__", "__getnewargs_ex__")


def copied(module: nn.Module, memo: dict[int, Any]) -> Any:
    """Copy a module like `copy.deepcopy(module, memo)`, except that copied buffers of torch's layers share no storage.

    Args:
        module: the module, with its submodules; a module that defines its own copying is copied by `copy.deepcopy`.
        memo: id of an object -> its copy; new copies are added.
    """
    if id(module) in memo:
        return memo[id(module)]
    kind = type(module)
    if not _is_ordinary(kind):
        return copy.deepcopy(module, memo)
    made = memo[id(module)] = kind.__new__(kind)
    state, of_torch = vars(made), _is_of_torch(kind)
    for name, value in vars(module).items():
        if type(value) in _PLAIN or (type(value) is tuple and all(type(each) in _PLAIN for each in value)):
            state[name] = value
        elif name == "_modules":
            state[name] = {key: None if child is None else copied(child, memo) for key, child in value.items()}
        elif name in ("_parameters", "_buffers") and of_torch:
            state[name] = {key: _copied_tensor(tensor, memo) for key, tensor in value.items()}
        elif type(value) in _CONTAINERS and not value:
            state[name] = memo.setdefault(id(value), value.copy())  # mostly hooks; modules may share the container
        else:
            state[name] = copy.deepcopy(value, memo)
    return made


def values_with_history(model: nn.Module) -> dict[int, Any]:
    """Return id -> detached copy of every tensor with an autograd history that an attribute of a module holds.

    The result is a memo for `copied` and `copy.deepcopy`, which refuse to copy tensors with a history. Hooks compute
    such tensors (`torch.nn.utils.weight_norm`), and a forward may store them.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            tensors = (
                value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            )
            memo.update({id(t): t.detach().clone() for t in tensors if isinstance(t, Tensor) and not t.is_leaf})
    return memo


def to_run(model: nn.Module) -> nn.Module:
    """Return a copy with the same parameters, for calls that may change buffers and attributes."""
    memo = values_with_history(model)
    return copy.deepcopy(model, {**{id(each): each for each in model.parameters()}, **memo})


def _copied_tensor(tensor: Tensor | None, memo: dict[int, Any]) -> Any:
    if tensor is None or id(tensor) in memo:
        return None if tensor is None else memo[id(tensor)]
    if type(tensor) is not Tensor or tensor.requires_grad:
        return copy.deepcopy(tensor, memo)
    memo[id(tensor)] = tensor.clone()
    return memo[id(tensor)]


def _is_ordinary(kind: type[nn.Module]) -> bool:
    """Return whether a class uses nn.Module's default copy behaviour, so attributes can be copied one by one."""
    if any(getattr(kind, name, None) is not getattr(nn.Module, name, None) for name in _HOW_COPIED):
        return False
    torch_setstate = _is_of_torch(kind.__setstate__)  # torch's `__setstate__` only updates states of old versions
    return (
        torch_setstate
        and not issubclass(kind, nn.RNNBase)
        and not any("__slots__" in vars(each) for each in kind.__mro__)
    )


def _is_of_torch(defined: Any) -> bool:
    return str(defined.__module__).startswith("torch.nn.modules.")


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
