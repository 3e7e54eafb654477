"""State of a task and its losses: what they remember from batch to batch, in a form that a checkpoint can hold."""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.training.state.train_state import NotPlain, TrainState, module_state, restore_module

_CONSTANT = (type, FunctionType, BuiltinFunctionType, torch.dtype, torch.device)


def task_state(task: object, model: nn.Module) -> Any:
    """Return the state of a task for `restore_task`: the state of its modules, and the attributes of its other objects.

    Args:
        task: the task; objects in its attributes are included, recursively.
        model: the network that is trained; it is left out where a task refers to it.

    >>> class Counting:
    ...     def __init__(self) -> None:
    ...         self.batches = 3
    >>> task_state(Counting(), nn.Identity())
    ['object', {'batches': ['value', 3]}]
    """
    return _state(task, {id(model)})


def restore_task(task: object, state: Any, device: torch.device) -> None:
    """Restore a task of the same kind from `task_state`; raise `ValueError` if the state belongs to another task."""
    _restored(task, state, device)


def _state(value: Any, seen: set[int]) -> Any:
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, _CONSTANT) or id(value) in seen:
        return ["same", None]
    if isinstance(value, nn.Module):
        seen.add(id(value))
        return ["module", module_state(value)]
    if _has_only_attributes(value):
        seen.add(id(value))
        own = {name: each for name, each in vars(value).items() if name != "metrics"}  # constants: names and directions
        return ["object", {name: _state(each, seen) for name, each in own.items()}]
    if type(value) in (dict, list, tuple) and not _is_plain(value):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [type(value).__name__, {name: _state(each, seen) for name, each in pairs}]
    return ["value", value]


def _restored(now: Any, state: Any, device: torch.device) -> Any:
    """Return the value to put in place of `now`: `now` itself, restored in place, if it is an object with a state."""
    kind, content = state
    if kind == "value" and not callable(now):
        return content.to(device) if isinstance(content, Tensor) and isinstance(now, Tensor) else content
    if kind == "same":
        return now
    owner = now.__self__ if isinstance(now, MethodType) else now
    if kind == "module" and isinstance(owner, nn.Module):
        restore_module(owner, content)
    elif kind == "object" and _has_only_attributes(owner):
        vars(owner).update({name: _restored(vars(owner).get(name), each, device) for name, each in content.items()})
    elif kind == type(now).__name__ == "dict":
        return {name: _restored(now.get(name), each, device) for name, each in content.items()}
    elif kind == type(now).__name__ in ("list", "tuple") and len(now) == len(content):
        return type(now)(_restored(each, content[index], device) for index, each in enumerate(now))
    else:
        raise ValueError(f"it belongs to another task: it has a {kind} in the place of a {type(now).__name__}")
    return now


def _has_only_attributes(value: object) -> bool:
    """Return whether attributes are an object's whole state: no container, and no pickling of its own."""
    if not hasattr(value, "__dict__") or type(value).__reduce__ is not object.__reduce__:
        return False
    try:
        parts: Any = object.__reduce_ex__(value, 2)
        _, arguments, _, items, pairs = parts
    except (TypeError, ValueError):
        return False
    return bool(arguments == (type(value),) and items is None and pairs is None)


def _is_plain(value: object) -> bool:
    try:
        TrainState.of({"value": value})
    except NotPlain:
        return False
    return True
