"""Reparametrization of a pruned parameter, as in `torch.nn.utils.prune`: `name_orig`, `name_mask`, forward pre-hook.

`name_orig` keeps every value. Each forward sets

    name = name_orig where name_mask != 0, else 0           (a new tensor; gradients of `name_orig` are masked)
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.hooks import unserializable_hook

# The backward of a threshold returns 0 where mask <= 0, else the tensor: one pass, as fast as a product, NaN-safe.
_select = torch.ops.aten.threshold_backward.default
_select_into = torch.ops.aten.threshold_backward.grad_input


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `tensor` with exactly 0 where `mask` is 0, also in place of NaN and inf; differentiable.

    `tensor` may be sparse (a gradient of an embedding); `mask` must be dense, of zeros and ones.
    """
    mask = mask.to(tensor.dtype)
    if tensor.is_sparse:
        indices = tensor._indices()
        return torch.sparse_coo_tensor(
            indices,
            masked(tensor._values(), mask[tuple(indices)]),
            tensor.shape,
            device=tensor.device,
            is_coalesced=tensor.is_coalesced(),
            check_invariants=False,
        )
    if tensor.is_complex() or tensor.itemsize == 1:  # a pruned network may have been converted to 8-bit floats
        return torch.where(mask == 0, torch.zeros_like(tensor), tensor)
    if is_capturing():
        return tensor.masked_fill(mask == 0, 0)
    return cast(Tensor, _select(tensor, mask, 0))


def mask_(tensor: Tensor, mask: Tensor) -> None:
    """Set `tensor` to exactly 0 where `mask` is 0, in place; its version counter changes, its history does not."""
    values = tensor.detach()  # cheaper than `no_grad`: this runs in every training step
    if mask.dtype != values.dtype:
        mask = mask.to(values.dtype)
    if values.is_sparse:
        mask_(values._values(), mask[tuple(values._indices())])
    elif values.is_complex():
        values.masked_fill_(mask == 0, 0)
    else:
        _select_into(values, mask, 0, grad_input=values)


def is_capturing() -> bool:
    """Return whether code is being compiled, exported or traced, when tensors must not be changed in place."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def masked_sparsely(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the result of `masked`, for a tensor whose gradient may be sparse."""
    return cast(Tensor, _Masked.apply(tensor, mask))  # type: ignore[no-untyped-call]


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return masked(tensor, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return masked(grads[0], mask), None


class LiveOutProj(NonDynamicallyQuantizableLinear):
    """Output projection whose pruned parameters are computed from `name_orig` and `name_mask` when they are read."""

    def __getattr__(self, name: str) -> Tensor | nn.Module:
        for hook in self.__dict__.get("_forward_pre_hooks", {}).values():
            reparam = getattr(hook, "_reparam", None)
            if reparam is not None and reparam.name == name:
                value: Tensor = reparam.read(self)
                return value
        return super().__getattr__(name)


def make_live(module: nn.Module) -> None:
    """Compute the pruned parameters of an attention's output projection at each read; other modules do not change."""
    kind: type = type(module)
    if kind is NonDynamicallyQuantizableLinear:
        module.__class__ = LiveOutProj
    elif kind.__bases__ == (NonDynamicallyQuantizableLinear,) and parametrize.is_parametrized(module):
        # torch made this class for the module, and restores the base class when the parametrization is removed.
        kind.__bases__ = (LiveOutProj,)


def make_plain(module: nn.Module) -> None:
    """Undo `make_live` if no pruned parameter is left.

    The class of a parametrized module stays, because copies of the module may share it.
    """
    if type(module) is LiveOutProj and not any(
        getattr(hook, "_reparam", None) is not None for hook in module._forward_pre_hooks.values()
    ):
        cast(nn.Module, module).__class__ = NonDynamicallyQuantizableLinear


def orig_name(name: str) -> str:
    """Return the name of the parameter that holds the values of `name`."""
    return f"{name}_orig"


def mask_name(name: str) -> str:
    """Return the name of the buffer that holds the mask of `name`."""
    return f"{name}_mask"


def publish(module: nn.Module, name: str, value: Tensor) -> None:
    """Set `module.name` to `value` without registering it; raise TypeError if `name` is a registered parameter."""
    if name in module._parameters:
        raise TypeError(
            f"`{name}` of {type(module).__name__} was assigned a parameter while `{orig_name(name)}` is pruned; assign "
            f"to `{orig_name(name)}`, or call `remove` first."
        )
    if isinstance(module, LiveOutProj):  # the class computes `name` when it is read
        module.__dict__.pop(name, None)
    else:
        setattr(module, name, value)


def stored(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Return the parameter `name_orig` and the buffer `name_mask`."""
    try:
        return cast(Tensor, module._parameters[name + "_orig"]), cast(Tensor, module._buffers[name + "_mask"])
    except KeyError:  # a replica of `nn.DataParallel` stores both as plain attributes
        if hasattr(module, orig_name(name)) and hasattr(module, mask_name(name)):
            return getattr(module, orig_name(name)), getattr(module, mask_name(name))
        raise RuntimeError(
            f"`{orig_name(name)}` and `{mask_name(name)}` of {type(module).__name__} are missing: the module took the "
            "hooks of a pruned one, as quantised modules do; call pruning.remove_all(model) before you convert it."
        ) from None


class Reparam:
    """Reparametrization of one parameter: sets `name` to `name_orig` under `name_mask`; the module's hook calls it.

    `own` is the `apply_mask` of a subclass that overrides it; its result is then the value of `name`.
    """

    _checked: weakref.ref[Tensor] | None = None  # the last mask checked for zeros and ones; `_version` is its version
    _version = 0

    def __init__(self, name: str) -> None:
        self.name = name
        self.own: Callable[[nn.Module], Tensor] | None = None
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # a set, because shallow copies share hooks

    def read(self, module: nn.Module, *, checked: bool = True) -> Tensor:
        """Return a new masked tensor.

        Args:
            module: module of the parameter.
            checked: whether to `check` the mask. Training steps never check, because `DistributedDataParallel` writes
                to buffers before each step.

        Raises:
            ValueError: see `check`.
        """
        if self.own is not None:
            return self.own(module)
        orig, mask = stored(module, self.name)
        capturing = is_capturing()
        if checked and not capturing and not (module.training and torch.is_grad_enabled()):
            self.check(module, mask)
        if getattr(module, "sparse", False) and not capturing:  # an embedding with sparse gradients
            return masked_sparsely(orig, mask)
        return masked(orig, mask)

    def check(self, module: nn.Module, mask: Tensor) -> None:
        """Check that `name_mask` holds zeros and ones, if it changed since the last check.

        Raises:
            ValueError: the mask has other entries. An average of masks has such entries, and pruned weights would
                become nonzero with it.
        """
        try:
            if self._checked is not None and self._checked() is mask and self._version == mask._version:
                return
        except RuntimeError:  # tensors made in inference mode have no version counter
            return
        if not _can_be_read(mask):
            return
        wrong = mask[(mask != 0) & (mask != 1)]
        if wrong.numel():
            raise ValueError(
                f"`{mask_name(self.name)}` of {type(module).__name__} (with an entry {wrong[0].item():g}) must hold "
                "only zeros and ones. AveragedModel averages masks with use_buffers=True: pass use_buffers=False, or "
                "call `pruning.MaskSet.collect(model).apply(averaged.module, replace=True)` after each change of masks."
            )
        self.trust(mask)

    def trust(self, mask: Tensor) -> None:
        """Mark a mask as checked until it changes."""
        if not mask.is_inference():
            self._checked, self._version = weakref.ref(mask), mask._version

    def refresh(self, module: nn.Module) -> None:
        """Compute and set `module.name`; the hook calls this before each forward."""
        publish(module, self.name, self.read(module))
        if not is_capturing():
            self._modules.add(module)

    def refresh_between(self, module: nn.Module) -> None:
        """Compute and set `module.name` between forwards; a backward after the next step raises if it is still read.

        This is so where a parent reads `module.name` and never calls the module: no hook refreshes it.
        """
        self.refresh(module)
        (orig, _), value, kind = stored(module, self.name), getattr(module, self.name), type(module).__name__
        if not value.requires_grad or value.is_leaf or orig.is_inference() or _is_of_transform(value):
            return
        version = orig._version

        def require(_grad: Tensor) -> None:
            if orig._version != version:
                raise RuntimeError(
                    f"`{self.name}` of {kind} has the values of an earlier step, because it was read without a call of "
                    "the module; hold masks by a keeper: masks = pruning.MaskSet.collect(model), "
                    "pruning.remove_all(model), pruning.MaskKeeper(model, masks)."
                )

        value.register_hook(unserializable_hook(require))  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        for module in self._modules:
            if _is_of_transform(module.__dict__.get(self.name)):
                raise ValueError(
                    f"`{self.name}` of {type(module).__name__} is a tensor of a torch.func transform, which cannot be "
                    "saved; run the model once outside the transform, or save `copy.deepcopy(model)`."
                )
        # Save the modules too: compiled code, which cannot record them, may run the loaded model first.
        return {**vars(self), "_checked": None, "_modules": list(self._modules)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _modules=weakref.WeakSet(state["_modules"]))

    def __deepcopy__(self, memo: dict[int, Any]) -> Reparam:
        # torch refuses to copy a tensor with a history or of a transform. So the copy is computed here from the copied
        # parameter and mask, before deepcopy reaches the tensor: a module's hooks are copied before later attributes.
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
    """Return whether a mask's entries can be read: not under a dispatch mode, nor in a torch.func transform."""
    plain = type(mask) is Tensor and not mask.is_meta and not _is_of_transform(mask)
    return plain and _get_current_dispatch_mode() is None


def _is_of_transform(value: object) -> bool:
    """Return whether a torch.func transform, such as `vmap`, made a tensor; such a tensor has no storage."""
    return isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)


def _with_copied_tensors(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Return a stand-in for the unfinished copy of `module`, with copied parameters and buffers."""
    stand_in = nn.Module.__new__(type(module))
    tensors = {kind: copy.deepcopy(vars(module)[kind], memo) for kind in ("_parameters", "_buffers")}
    vars(stand_in).update(vars(module), **tensors)
    return stand_in


def held(model: nn.Module) -> Iterator[tuple[nn.Module, Reparam]]:
    """Yield (module, reparametrization) for every parameter in `model` that this package pruned."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            reparam = getattr(hook, "_reparam", None)
            if isinstance(reparam, Reparam):
                yield module, reparam


def mask_gradients(model: nn.Module) -> None:
    """Set the gradients of pruned entries to zero."""
    for module, reparam in held(model):
        orig, mask = stored(module, reparam.name)
        if orig.grad is not None:
            mask_(orig.grad, mask)
