"""Two ways for a module to hold a pruned parameter. Both keep `name_orig`, `name_mask` and a forward pre-hook.

`reparam` is what `torch.nn.utils.prune` does: `name_orig` keeps every value, and each forward sets

    name = name_orig where name_mask != 0, else 0           (a new tensor; gradients of `name_orig` are masked)

`inplace` stores the zeros in `name_orig` itself, and `name` is `name_orig`: a training step costs what a dense one
does. An optimizer may move pruned entries; whatever has changed is masked again before it is used:

    name_orig <- 0 where name_mask == 0      (only if the version of either has changed, or any optimizer has stepped)

Gradients are those of the dense parameter: call `mask_gradients` before clipping by norm. A loop that reads the weights
itself, compiles the model, or writes the parameter in a way that torch does not count (`.data`, a collective of
`torch.distributed`, another process) calls `enforce_masks` afterwards.
"""

from __future__ import annotations

import copy
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from pruning.attention import LiveOutProj
from pruning.masking import is_capturing, mask_, masked, masked_sparsely

EngineName: TypeAlias = Literal["reparam", "inplace"]


def orig_name(name: str) -> str:
    """Return the name of the parameter that holds the values of `name`."""
    return f"{name}_orig"


def mask_name(name: str) -> str:
    """Return the name of the buffer that holds the mask of `name`."""
    return f"{name}_mask"


def publish(module: nn.Module, name: str, value: Tensor) -> None:
    """Make `value` what `module.name` reads, without registering it; refuse to hide a parameter."""
    if name in module._parameters:
        raise TypeError(
            f"`{name}` of {type(module).__name__} was assigned a parameter while `{orig_name(name)}` is held pruned; "
            "assign that one, or call `remove` before."
        )
    if isinstance(module, LiveOutProj):  # computes `name` when it is read
        module.__dict__.pop(name, None)
    elif isinstance(value, nn.Parameter):
        module.__dict__[name] = value  # setattr would register it a second time
        if isinstance(module, nn.RNNBase) and name in module._flat_weights_names:
            module._flat_weights[module._flat_weights_names.index(name)] = value
    else:
        setattr(module, name, value)


def stored(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Return the parameter `name_orig` and the buffer `name_mask`."""
    try:
        return cast(Tensor, module._parameters[name + "_orig"]), cast(Tensor, module._buffers[name + "_mask"])
    except KeyError:  # a replica of `nn.DataParallel` holds them as plain attributes
        return getattr(module, orig_name(name)), getattr(module, mask_name(name))


class Engine(ABC):
    """How one parameter of one module is held; the module's hook calls it."""

    label: ClassVar[EngineName]

    def __init__(self, name: str) -> None:
        self.name = name
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # several: shallow copies share their hooks

    @abstractmethod
    def start(self, module: nn.Module, orig: Tensor, mask: Tensor) -> Tensor:
        """Return the first value of the parameter under `mask`."""

    @abstractmethod
    def read(self, module: nn.Module) -> Tensor:
        """Return the current value of the parameter."""

    @abstractmethod
    def enforce(self, module: nn.Module) -> None:
        """Do what is due after an optimizer's step."""

    @abstractmethod
    def finish(self, orig: Tensor, mask: Tensor) -> None:
        """Make the pruned value that of `orig`."""

    def refresh(self, module: nn.Module) -> None:
        """Do what is due before a forward."""
        value = self.read(module)
        if is_capturing():
            publish(module, self.name, value)
        elif module.__dict__.get(self.name) is not value:
            self.publish(module, value)

    def publish(self, module: nn.Module, value: Tensor) -> None:
        """Make `value` what the parameter reads in `module`."""
        publish(module, self.name, value)
        self._modules.add(module)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key != "_modules"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _modules=weakref.WeakSet())

    def __deepcopy__(self, memo: dict[int, Any]) -> Engine:
        # torch refuses to copy a tensor with a history, so its copy is made here, from the copies of what it comes
        # from, before deepcopy reaches the tensor: a module's hooks are copied before its later attributes.
        copied = self.__class__.__new__(self.__class__)
        memo[id(self)] = copied
        copied.__setstate__({key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()})
        for module in self._modules:
            if id(module) in memo:
                copied._modules.add(memo[id(module)])
            value = module.__dict__.get(self.name)
            if isinstance(value, Tensor) and not value.is_leaf and id(value) not in memo:
                memo[id(value)] = masked(*(copy.deepcopy(tensor, memo) for tensor in stored(module, self.name)))
        return copied


class Reparam(Engine):
    """A fresh masked tensor for each forward."""

    label = "reparam"

    def start(self, module: nn.Module, orig: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        """Return the masked tensor."""
        return masked(orig, mask)

    def read(self, module: nn.Module) -> Tensor:
        """Return a new masked tensor."""
        orig, mask = stored(module, self.name)
        if getattr(module, "sparse", False) and not is_capturing():  # an embedding that has sparse gradients
            return masked_sparsely(orig, mask)
        return masked(orig, mask)

    def enforce(self, module: nn.Module) -> None:
        """Do nothing: no forward reads `name_orig` itself."""

    def finish(self, orig: Tensor, mask: Tensor) -> None:
        """Give `orig` new storage with its zeros; tensors that share the old one keep their values."""
        orig.data = masked(orig.detach(), mask)


class InPlace(Engine):
    """Zeros kept in `name_orig` itself."""

    label = "inplace"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._owned: Tensor | None = None  # may be written; any other is a caller's (functional_call)
        self._seen: _State | None = None  # when last masked

    def start(self, module: nn.Module, orig: Tensor, mask: Tensor) -> Tensor:  # noqa: ARG002
        """Zero the pruned entries of `orig`, own it from now on, and return it."""
        mask_(orig, mask)
        torch.clear_autocast_cache()  # it may hold the values of before
        self._owned = orig
        self._seen = _state(orig, mask)
        return orig

    def read(self, module: nn.Module) -> Tensor:
        """Return the parameter, masked again if it has changed; if it must not be written, a masked copy."""
        orig, mask = stored(module, self.name)
        if orig is not self._owned or is_capturing():
            return masked(orig, mask)
        now, seen = _state(orig, mask), self._seen
        if now != seen or now is None:
            # A mask that was only rewritten with its old values (DDP does so before each forward) and the step of
            # another optimizer must not touch `orig`, which an unfinished backward may need.
            written = now is None or seen is None or now.orig != seen.orig
            if written or not torch.equal(masked(orig.detach(), mask), orig.detach()):
                mask_(orig, mask)
            self._seen = _state(orig, mask)
        return orig

    def enforce(self, module: nn.Module) -> None:
        """Zero the pruned entries, also those of a parameter put in place of the old one, which is taken over."""
        orig, mask = stored(module, self.name)
        self._seen = None
        self.publish(module, self.start(module, orig, mask))

    def finish(self, orig: Tensor, mask: Tensor) -> None:
        """Zero the pruned entries in the parameter's own storage."""
        mask_(orig, mask)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_seen": None}  # versions start anew in a copy


class _State(NamedTuple):
    """What changes when the parameter or its mask is written or replaced."""

    orig: tuple[int, int]
    steps: int
    mask: tuple[int, int]


def _state(orig: Tensor, mask: Tensor) -> _State | None:
    """Return the state of both; None for tensors made in inference mode, which have no versions."""
    if orig.is_inference() or mask.is_inference():
        return None
    return _State((orig._version, orig.data_ptr()), _steps().count, (mask._version, mask.data_ptr()))


class _Steps:
    """Counts the steps of all optimizers: fused ones write their parameters without changing their versions."""

    def __init__(self) -> None:
        self.count = 0
        register_optimizer_step_post_hook(self._add)

    def _add(self, *_: object) -> None:
        self.count += 1


@cache
def _steps() -> _Steps:
    return _Steps()


def engine_of(module: nn.Module, name: str | None) -> Engine | None:
    """Return what holds the parameter `name` of `module`, if it is pruned by this package."""
    return next((engine for _, own, engine in _held_by(module) if own == name), None)


ENGINES: dict[str, type[Engine]] = {"reparam": Reparam, "inplace": InPlace}


def check_engine(engine: str | None) -> None:
    """Raise `ValueError` unless `engine` names one, or is None."""
    if engine is not None and engine not in [*ENGINES]:
        raise ValueError(f"`engine` (={engine!r}) must be one of {', '.join(map(repr, ENGINES))}.")


def held(model: nn.Module) -> Iterator[tuple[nn.Module, str, Engine]]:
    """Yield (module, name, engine) of every parameter in `model` that this package holds pruned."""
    for module in model.modules():
        yield from _held_by(module)


def _held_by(module: nn.Module) -> Iterator[tuple[nn.Module, str, Engine]]:
    for hook in module._forward_pre_hooks.values():
        engine = getattr(hook, "_engine", None)
        if isinstance(engine, Engine):
            yield module, engine.name, engine


def enforce_masks(model: nn.Module) -> None:
    """Set every pruned entry of the parameters held by the `inplace` engine to zero, now.

    Call it after the optimizer's step where no forward follows that would do it (before weights are saved or read),
    where the model is compiled, and after `load_state_dict(assign=True)`. Parameters held by `reparam` are left alone.
    """
    for module, _, engine in held(model):
        engine.enforce(module)


def mask_gradients(model: nn.Module) -> None:
    """Set the gradients of pruned entries to zero, as `reparam` has them: call it before clipping them by norm."""
    for module, name, _ in held(model):
        orig, mask = stored(module, name)
        if orig.grad is not None:
            mask_(orig.grad, mask)
