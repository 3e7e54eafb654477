"""Everything that a training needs to go on bit for bit, as tensors and plain JSON: nothing is ever pickled."""

from __future__ import annotations

import math
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
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
    """A state that is not made of tensors, numbers, text, and dicts, lists and tuples of these; says which one."""


@dataclass(frozen=True)
class TrainState:
    """A state as `tensors` by name, and `values`: JSON in which {"tensor": name} stands for one of them.

    >>> state = TrainState.of({"step": 3, "optimizer": {0: {"momentum_buffer": torch.ones(2)}}})
    >>> state.part("optimizer")
    {0: {'momentum_buffer': tensor([1., 1.])}}
    """

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    values: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, parts: Mapping[str, Any]) -> Self:
        """Return the state that has these parts: nested dicts, lists and tuples; its tensors are those given.

        Raises:
            NotPlain: a part holds something else.
        """
        tensors: dict[str, Tensor] = {}
        return cls(tensors, {name: _encoded(part, name, tensors) for name, part in parts.items()})

    def part(self, name: str) -> Any:
        """Return a part as it was given, its tensors copied.

        Raises:
            ValueError: there is no such part, or what it says is no state.
        """
        try:
            return _decoded(self.values[name], self.tensors)
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
            raise ValueError(f"it holds no state of the part {name!r}: {error!r}") from None


def as_tensor(data: bytes) -> Tensor:
    """Return bytes as a tensor of uint8, so that a state can hold them."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> bytes:
    """Return what `as_tensor` was given."""
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
    """Give the global generators the states that `generators` returned; raise `ValueError` for what is none."""
    try:
        torch.set_rng_state(states["torch"])
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
    except RuntimeError as error:
        raise ValueError(f"it holds no state of a generator: {error}") from error
    random.setstate(states["python"])
    key = np.array(states["numpy"]["state"]["key"], dtype=np.uint32)
    np.random.set_state({**states["numpy"], "state": {**states["numpy"]["state"], "key": key}})  # noqa: NPY002


def module_state(module: nn.Module) -> dict[str, Any]:
    """Return all parameters and buffers of a module, those that its state_dict leaves out too, and its extra state."""
    return {"tensors": dict(_tensors(module)), "extra": extra_state(module)}


def extra_state(module: nn.Module) -> dict[str, Any]:
    """Return what the `get_extra_state` of a module and those in it say, by their names."""
    return {
        name: each.get_extra_state()
        for name, each in module.named_modules()
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }


def restore_extra_state(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Give a module what `extra_state` returned of one like it."""
    for name, extra in state.items():
        module.get_submodule(name).set_extra_state(extra)


def restore_module(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Copy into a module what `module_state` returned of one like it.

    Raises:
        ValueError: it was another: a tensor is missing, or has another shape or dtype; nothing was changed.
    """
    found, saved = dict(_tensors(module)), state["tensors"]
    if found.keys() != saved.keys():
        raise ValueError(f"it is of another network: {', '.join(sorted(found.keys() ^ saved.keys())[:3])}")
    for name, tensor in found.items():
        if (tensor.shape, tensor.dtype) != (saved[name].shape, saved[name].dtype):
            raise ValueError(f"it is of another network: {name} has the shape {tuple(saved[name].shape)} there")
    with torch.no_grad():
        for name, tensor in found.items():
            tensor.copy_(saved[name])
    restore_extra_state(module, state["extra"])


def optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the state of an optimizer; of one that is not torch's own, also what else it has as attributes.

    Raises:
        NotPlain: of an own optimizer an attribute holds more than numbers and text.
    """
    state = {"state": optimizer.state_dict(), "own": _own(optimizer)}
    tensors: dict[str, Tensor] = {}
    _encoded(state["own"], "optimizer", tensors)
    if tensors:
        raise NotPlain(f"{next(iter(tensors))} is a tensor outside of its `state`")
    return state


def restore_optimizer(optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """Give an optimizer the state that `optimizer_state` returned: each tensor in the dtype that it had.

    Raises:
        ValueError: in one of torch's own a tensor does not fit its parameter, or a setting has another type.
    """
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(state["state"])
    if _is_torchs(optimizer):
        for now, group in zip(before, optimizer.param_groups, strict=True):
            _hold_types(now, group)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, parameter in enumerate(parameters):
        for name, value in state["state"]["state"].get(index, {}).items():
            if _is_torchs(optimizer) and not _fits(value, parameter):
                raise ValueError(f"{name} of the optimizer does not fit its parameter")
            now = optimizer.state[parameter].get(name)
            if isinstance(value, Tensor) and isinstance(now, Tensor) and now.dtype != value.dtype:
                optimizer.state[parameter][name] = value.to(now.device)
    for name, value in state["own"].items():
        setattr(optimizer, name, value)


def _own(optimizer: Optimizer) -> dict[str, Any]:
    """Return the attributes of an optimizer of the user's own that no optimizer of torch's has."""
    if _is_torchs(optimizer):
        return {}
    common = {*vars(torch.optim.SGD([torch.zeros(1)])), "step", "_opt_called"}  # a scheduler wraps `step`
    return {name: value for name, value in vars(optimizer).items() if name not in common}


def _is_torchs(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.optim.")


def _hold_types(now: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting of an optimizer's group that is gone, or of another type than now."""
    for name in now.keys() - {"params"}:
        kinds = [float if type(each.get(name)) is int else type(each.get(name)) for each in (now, saved)]
        if kinds[0] is not kinds[1]:
            raise ValueError(f"{name} of the optimizer is of type {kinds[1].__name__}")


def _fits(value: Any, parameter: Tensor) -> bool:
    """Tell whether an optimizer's value is one number, or a tensor like the parameter, of that length or 1 each way."""
    if not isinstance(value, Tensor) or not value.ndim:
        return isinstance(value, int | float | Tensor)
    lengths = zip(value.shape, parameter.shape, strict=False)
    alike = (value.ndim, value.dtype) == (parameter.ndim, parameter.dtype)
    return alike and all(length in (1, whole) for length, whole in lengths)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _encoded(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value as JSON: what JSON has no word for is an object of one member that names what it is."""
    kind = type(value)
    if value is None or kind in (bool, str) or (kind is int and abs(value) < _MOST_INT):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized:
            raise NotPlain(f"{path} is a tensor of layout {value.layout}")
        if is_lazy(value) or not _is_storable(value.dtype):
            raise NotPlain(f"{path} is a tensor of {'no shape yet' if is_lazy(value) else value.dtype}")
        while path in tensors:  # keys may hold a slash, and 0 and "0" read alike
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
    except Exception:  # KeyError today
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
