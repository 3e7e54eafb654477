"""How a module holds a pruned parameter, as in `torch.nn.utils.prune`: `name_orig`, `name_mask` and a forward pre-hook.

`name_orig` keeps every value, and each forward sets

    name = name_orig where name_mask != 0, else 0           (a new tensor; gradients of `name_orig` are masked)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from pruning.holding.attention import LiveOutProj
from pruning.holding.masking import is_capturing, mask_, masked, masked_sparsely


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
    else:
        setattr(module, name, value)


def stored(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Return the parameter `name_orig` and the buffer `name_mask`."""
    try:
        return cast(Tensor, module._parameters[name + "_orig"]), cast(Tensor, module._buffers[name + "_mask"])
    except KeyError:  # a replica of `nn.DataParallel` holds them as plain attributes
        return getattr(module, orig_name(name)), getattr(module, mask_name(name))


class Reparam:
    """Keeps `name` at `name_orig` under `name_mask` in one module; the module's hook calls it.

    `own` is the `apply_mask` of a subclass that has its own: what it returns is what `name` reads.
    """

    _checked: weakref.ref[Tensor] | None = None  # the mask that was found to hold zeros and ones, and its version
    _version = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.own: Callable[[nn.Module], Tensor] | None = None
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # several: shallow copies share their hooks

    def read(self, module: nn.Module, *, checked: bool = True) -> Tensor:
        """Return a new masked tensor.

        Args:
            module: holds the parameter.
            checked: whether to `check` the mask; training steps do not, for `DistributedDataParallel` writes to buffers
                before each.

        Raises:
            ValueError: see `check`.
        """
        if self.own is not None:
            return self.own(module)
        orig, mask = stored(module, self.name)
        capturing = is_capturing()
        if checked and not capturing and not (module.training and torch.is_grad_enabled()):
            self.check(module, mask)
        if getattr(module, "sparse", False) and not capturing:  # an embedding that has sparse gradients
            return masked_sparsely(orig, mask)
        return masked(orig, mask)

    def check(self, module: nn.Module, mask: Tensor) -> None:
        """Look at the entries of `name_mask` if it was changed since it was last looked at.

        Raises:
            ValueError: it holds other than zeros and ones, as an average of masks does, which revives pruned entries.
        """
        try:
            if self._checked is not None and self._checked() is mask and self._version == mask._version:
                return
        except RuntimeError:  # made in inference mode: its changes are not counted
            return
        if not _can_be_read(mask):
            return
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            raise ValueError(
                f"`{mask_name(self.name)}` of {type(module).__name__} (with entries of {wrong[0].item():g}) must hold "
                "zeros and ones. AveragedModel averages masks with use_buffers=True: pass use_buffers=False, or call "
                "`pruning.MaskSet.collect(model).apply(averaged.module, replace=True)` whenever masks have changed."
            )
        self.trust(mask)

    def trust(self, mask: Tensor) -> None:
        """Take it that a mask holds zeros and ones until it is changed."""
        if not mask.is_inference():
            self._checked, self._version = weakref.ref(mask), mask._version

    def refresh(self, module: nn.Module) -> None:
        """Set `module.name` anew, as is due before a forward."""
        publish(module, self.name, self.read(module))
        if not is_capturing():
            self._modules.add(module)

    def __getstate__(self) -> dict[str, Any]:
        for module in self._modules:
            if _is_of_transform(module.__dict__.get(self.name)):
                raise ValueError(
                    f"`{self.name}` of {type(module).__name__} holds a tensor of a transform of torch.func, which "
                    "cannot be saved; run the model once outside of the transform, or save `copy.deepcopy(model)`."
                )
        # The modules go along, for compiled code, which cannot note them, may be the first to run what is loaded.
        return {**vars(self), "_checked": None, "_modules": list(self._modules)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _modules=weakref.WeakSet(state["_modules"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Reparam:
        # torch refuses to copy a tensor that has a history or is of a transform, so its copy is made here, from the
        # copies of what it comes from, before deepcopy reaches it: a module's hooks are copied before later attributes.
        copied = memo[id(self)] = type(self)(self.name)
        copied.own = copy.deepcopy(self.own, memo)
        for module in self._modules:
            if id(module) in memo:
                copied._modules.add(memo[id(module)])
            value = module.__dict__.get(self.name)
            if not isinstance(value, Tensor) or id(value) in memo:
                continue
            if not value.is_leaf or _is_of_transform(value):
                memo[id(value)] = self.read(_with_copied_tensors(module, memo), checked=False)
        return copied


def _can_be_read(mask: Tensor) -> bool:
    """Say whether the entries of a mask can be looked at: not while a mode traces, nor in a transform of torch.func."""
    plain = type(mask) is Tensor and not mask.is_meta and not _is_of_transform(mask)
    return plain and _get_current_dispatch_mode() is None


def _is_of_transform(value: object) -> bool:
    """Say whether a transform of torch.func, as `vmap`, has made a tensor: it has no storage of its own."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _with_copied_tensors(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a stand-in for `module` that has the parameters and buffers of its copy, which is not filled yet."""
    stand_in = nn.Module.__new__(type(module))
    tensors = {kind: copy.deepcopy(vars(module)[kind], memo) for kind in ("_parameters", "_buffers")}
    vars(stand_in).update(vars(module), **tensors)
    return stand_in


def held(model: nn.Module) -> Iterator[tuple[nn.Module, Reparam]]:
    """Yield (module, what holds its parameter) for every parameter in `model` that this package holds pruned."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            reparam = getattr(hook, "_reparam", None)
            if isinstance(reparam, Reparam):
                yield module, reparam


def mask_gradients(model: nn.Module) -> None:
    """Set the gradients of pruned entries to zero, whatever has put them there."""
    for module, reparam in held(model):
        orig, mask = stored(module, reparam.name)
        if orig.grad is not None:
            mask_(orig.grad, mask)
