"""State of a training and its task as tensors and plain JSON, enough to continue bit for bit; nothing is pickled."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

_PAIRS: Mapping[str, type] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
_LISTS: Mapping[str, type] = {"list": list, "tuple": tuple}
_MOST_INT = 2**63


class NotPlain(Exception):
    """State with a value that is not a tensor, number, text, or a dict, list or tuple of these; the text names it."""


@dataclass(frozen=True)
class TrainState:
    """Training state: `tensors` by name, and `values`, JSON in which {"tensor": name} stands for a tensor.

    >>> state = TrainState.of({"step": 3, "optimizer": {0: {"momentum_buffer": torch.ones(2)}}})
    >>> state.part("optimizer")
    {0: {'momentum_buffer': tensor([1., 1.])}}
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Self:
        """Build a state from its parts: nested dicts, lists and tuples. Tensors are not copied.

        Raises:
            NotPlain: a part holds a value of another type.
        """
        tensors: dict[str, Tensor] = {}
        return cls(tensors, {name: _encoded(part, name, tensors) for name, part in parts.items()})

    def copied(self) -> Self:
        """Return the state with tensors of its own, which no training changes."""
        return replace(self, tensors={name: tensor.clone() for name, tensor in self.tensors.items()})

    def get(self, name: str) -> Any:
        """Return a part like `part`; None if the state was saved by a release that did not have the part."""
        return self.part(name) if name in self.values else None

    def part(self, name: str) -> Any:
        """Return a part with its original types and with copies of its tensors.

        Raises:
            ValueError: the part is missing, or its content is not a state.
        """
        try:
            return _decoded(self.values[name], self.tensors)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"it has no valid state of the part {name!r}: {error!r}") from None


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor of uint8, which a state can hold."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """Return the bytes that `as_tensor` received."""
    return tensor.numpy().tobytes()


def generators(device: torch.device) -> dict[str, Any]:
    """Return the states of the global generators that `seeded` covers: torch's, CUDA's, Python's and NumPy's."""
    numpy = np.random.get_state(legacy=False)  # noqa: NPY002
    assert isinstance(numpy, dict)
    found = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": {**numpy, "state": {**numpy["state"], "key": numpy["state"]["key"].tolist()}},
    }
    return found | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def restore_generators(states: Mapping[str, Any], device: torch.device) -> None:
    """Restore the global generators from `generators`; raise `ValueError` if `states` are not theirs."""
    try:
        torch.set_rng_state(states["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
    except RuntimeError as error:
        raise ValueError(f"it has no valid state of a generator: {error}") from error
    random.setstate(states["python"])
    key = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**states["numpy"], "state": {**states["numpy"]["state"], "key": key}})  # noqa: NPY002


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's parameters, its buffers (non-persistent ones, too) and its extra state."""
    return {"tensors": dict(_tensors(module)), "extra": extra_state(module)}


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return the results of `get_extra_state` of a module and its submodules, by module name."""
    return {
        name: each.get_extra_state()
        for name, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }


def restore_extra_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore a module of the same structure from `extra_state`."""
    for name, extra in state.items():
        module.get_submodule(name).set_extra_state(extra)


def restore_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore a module from the `module_state` of a module of the same structure.

    Raises:
        ValueError: the state is another module's: a tensor is missing, or has another shape or dtype. The module is
            unchanged.
    """
    found, saved = dict(_tensors(module)), state["tensors"]
    if found.keys() != saved.keys():
        raise ValueError(f"it belongs to another network: {', '.join(sorted(found.keys() ^ saved.keys())[:3])}")
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            raise ValueError(f"it belongs to another network: {name} has the shape {tuple(saved[name].shape)} there")
    with torch.no_grad():
        for name, tensor in found.items():
            tensor.copy_(saved[name])
    restore_extra_state(module, state["extra"])


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer; for an optimizer that is not from torch, also its other attributes.

    Raises:
        NotPlain: an attribute of an optimizer of the user's own holds more than numbers and text.
    """
    state = {"state": optimizer.state_dict(), "own": _own_attributes(optimizer)}
    tensors: dict[str, Tensor] = {}
    _encoded(state["own"], "optimizer", tensors)
    if tensors:
        raise NotPlain(f"{next(iter(tensors))} is a tensor outside the optimizer's `state`")
    return state


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Restore an optimizer from `optimizer_state`; each tensor keeps the dtype that it had.

    Raises:
        ValueError: for an optimizer of torch, a tensor does not fit its parameter, or a setting has another type.
    """
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state["state"])
    if _is_from_torch(optimizer):
        for now, group in zip(before, optimizer.param_groups, strict=True):
            _require_same_types(now, group)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in state["state"]["state"].get(index, {}).items():
            if _is_from_torch(optimizer) and not _fits(value, parameter):
                raise ValueError(f"{name} of the optimizer does not fit its parameter")
            now = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(now.device)
    for name, value in state["own"].items():
        setattr(optimizer, name, value)


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer of the user's own that torch's optimizers do not have."""
    if _is_from_torch(optimizer):
        return {}
    common = {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called"}  # a scheduler wraps `step`
    return {name: value for name, value in vars(optimizer).items() if name not in common}


def _is_from_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _require_same_types(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError if a setting of a parameter group is missing, or has another type than now."""
    for name in now.keys() - {"params"}:
        kinds = [float if type(each.get(name)) is int else type(each.get(name)) for each in (now, saved)]
        if kinds[0] is not kinds[1]:
            raise ValueError(f"{name} of the optimizer has the type {kinds[1].__name__}")


def _fits(value: Any, parameter: Tensor) -> bool:
    """Return whether an optimizer's value is a number, or a tensor whose lengths are 1 or those of the parameter."""
    if not isinstance(value, Tensor) or not value.ndim:
        return isinstance(value, int | float | Tensor)
    lengths = zip(value.shape, parameter.shape, strict=False)
    alike = (value.ndim, value.dtype) == (parameter.ndim, parameter.dtype)
    return alike and all(length in (1, whole) for length, whole in lengths)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON; a value that JSON cannot express becomes an object with one member, its type."""
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and abs(value) < _MOST_INT):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise NotPlain(f"{path} is a tensor of layout {value.layout}")
        if is_lazy(value) or not _is_storable(value.dtype):
            raise NotPlain(f"{path} is a tensor {'without a shape' if is_lazy(value) else f'of {value.dtype}'}")
        while path in tensors:  # keys may contain a slash, and 0 and "0" give the same path
            path += "'"
        tensors[path] = value.detach()
        return {"tensor": path}
    for name, of in _LISTS.items():
        if kind is of:
            return {name: [_encoded(each, f"{path}/{index}", tensors) for index, each in enumerate(value)]}
    for name, of in _PAIRS.items():
        if kind is of:
            pairs = value.items()
            return {name: [[_encoded(k, path, {}), _encoded(v, f"{path}/{k}", tensors)] for k, v in pairs]}
    if isinstance(value, np.generic) and isinstance(value.item(), bool | int | float):
        return _encoded(value.item(), path, tensors)
    raise NotPlain(f"{path} is {kind.__module__}.{kind.__qualname__}")


@cache
def _is_storable(dtype: torch.dtype) -> bool:
    try:
        save({"": torch.empty(0, dtype=dtype)})
    except Exception:  # currently a KeyError
        return False
    return True


def _decoded(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content].clone()
    if kind == "float":
        return float(content)
    if kind in _LISTS:
        return _LISTS[kind](_decoded(each, tensors) for each in content)
    make: Callable[[Any], Any] = _PAIRS[kind]
    return make({_decoded(k, tensors): _decoded(v, tensors) for k, v in content})


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
