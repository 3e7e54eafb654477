"""Parameter of a module: find it, hold it under a mask, and release it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils.hooks import RemovableHandle

from pruning.holding.reparam import Reparam, make_live, make_plain, mask_name, masked, orig_name, stored


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """Make tensors that can be trained with, also inside of `torch.inference_mode`; a context and a decorator."""
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        yield


@dataclass
class ModuleParameter:
    """Parameter that may have been pruned before, by this package or by torch.

    `orig` is the parameter, `unchecked_mask` its stored mask (None if it was never pruned), and `key` the key of its
    hook in the module's forward pre-hooks.
    """

    module: nn.Module
    name: str
    orig: nn.Parameter
    unchecked_mask: Tensor | None
    key: int | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> ModuleParameter:
        """Find the parameter `name` of `module`, pruned or not, and check that it can be pruned further."""
        if not isinstance(cast(object, module), nn.Module):
            raise TypeError(f"`module` (={module!r}) must be an nn.Module, not {type(module).__name__}.")
        key = hook_key(module, name)
        if key is not None:
            orig, mask = stored(module, name)
            return cls(module, name, cast(nn.Parameter, orig), mask, key)
        parameter = module._parameters.get(name)
        if parameter is None:
            raise AttributeError(
                f"`name` (={name!r}) must be a parameter of {type(module).__name__}; its parameters are: "
                f"{', '.join(repr(key) for key, p in module._parameters.items() if p is not None) or 'none'}."
            )
        for taken in (orig_name(name), mask_name(name)):
            if hasattr(module, taken):
                raise AttributeError(f"{type(module).__name__} already has an attribute {taken!r}; rename it first.")
        return cls(module, name, parameter, None, None)

    @property
    def label(self) -> str:
        """Name of the tensor in error messages."""
        return f"{type(self.module).__name__}.{self.name}"

    @property
    def hook(self) -> Any:
        """Pruning method that is the parameter's hook; None if the parameter is not pruned."""
        return None if self.key is None else self.module._forward_pre_hooks[self.key]

    @property
    def mask(self) -> Tensor | None:
        """Mask so far, None if there is none; raises the errors of `Reparam.check`."""
        reparam = getattr(self.hook, "_reparam", None)
        if reparam is not None and self.unchecked_mask is not None:
            reparam.check(self.module, self.unchecked_mask)
        return self.unchecked_mask

    def copied_mask(self) -> Tensor:
        """Return a copy of the mask so far, ones if there is none, to change in place."""
        return torch.ones_like(self.orig.detach()) if self.mask is None else self.mask.detach().clone()

    @outside_inference_mode()
    def hold(self, hook: Any, mask: Tensor, own: Callable[[nn.Module], Tensor] | None = None) -> None:
        """Apply `mask`, and replace the earlier hook by `hook`; the module is not changed before this call.

        The hook is a forward pre-hook that calls its attribute `_reparam`, a `Reparam`, which this method sets. `own`
        is the `apply_mask` of a subclass that overrides it.
        """
        module, name = self.module, self.name
        mask = mask.clone() if mask.is_inference() else mask
        reparam = getattr(self.hook, "_reparam", None) or Reparam(name)
        if self.key is not None:
            self.hook._reparam = None  # the earlier hook may become one method of a container
        hook._reparam = reparam
        reparam.own = own
        make_live(module)
        if self.key is None:
            rename_parameter(module, name, orig_name(name))
            module.register_buffer(mask_name(name), mask)
            module.register_forward_pre_hook(hook)
        else:
            module._buffers[mask_name(name)] = mask
            module._forward_pre_hooks[self.key] = hook
        reparam.trust(mask)
        reparam.refresh_between(module)

    @outside_inference_mode()
    def release(self) -> None:
        """Remove everything that `hold` added, and keep the values that `name` reads."""
        if self.key is None or self.mask is None:
            raise ValueError(f"{self.label} is not pruned, so there is no pruning to remove.")
        module, name = self.module, self.name
        reparam = getattr(self.hook, "_reparam", None)
        own = None if reparam is None else reparam.own
        # New storage: tensors that share the old one keep their values.
        self.orig.data = masked(self.orig.detach(), self.mask) if own is None else own(module).detach()
        # A caller that iterates over the hooks (torch's own `remove`) deletes the key itself, so the key stays for now.
        module._forward_pre_hooks[self.key] = vacated
        make_plain(module)
        del module._buffers[mask_name(name)]
        rename_parameter(module, orig_name(name), name)
        setattr(module, name, self.orig)  # an RNN updates its own list of weights in `__setattr__`


def hook_key(module: nn.Module, name: str) -> int | None:
    """Return the key of the pruning hook of `name` in `module`'s forward pre-hooks, also of a hook of torch."""
    for key, hook in module._forward_pre_hooks.items():
        if is_pruning_hook(hook) and getattr(hook, "_tensor_name", None) == name:
            return key
    return None


def vacated(module: nn.Module, _inputs: object) -> None:
    """Placeholder hook after a removal; the first forward deletes it."""
    drop_vacated(module)


def drop_vacated(module: nn.Module) -> None:
    """Delete the placeholders of removed hooks."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is vacated]:
        del module._forward_pre_hooks[key]


@contextmanager
def hooked(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    """Remove hooks at the end of the context."""
    held = list(handles)
    try:
        yield
    finally:
        for handle in held:
            handle.remove()


def rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename a parameter without changing the order of parameters, which optimizers and saved states rely on."""
    renamed = [(new if name == old else name, parameter) for name, parameter in module._parameters.items()]
    module._parameters.clear()
    module._parameters.update(renamed)


def is_pruning_hook(hook: object) -> TypeGuard[torch_prune.BasePruningMethod]:
    """Return whether `hook` is a pruning method of this package or of torch (ours are registered with torch's)."""
    return isinstance(hook, torch_prune.BasePruningMethod)


def pruned_names(module: nn.Module) -> set[str]:
    """Return the names of `module`'s own parameters that are pruned by this package or by torch."""
    return {str(hook._tensor_name) for hook in module._forward_pre_hooks.values() if is_pruning_hook(hook)}


def plain_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield a module's own parameters under their names in the plain module: "weight", not "weight_orig"."""
    held = {orig_name(leaf): leaf for leaf in pruned_names(module)}
    for leaf, parameter in module._parameters.items():
        if parameter is not None:
            yield held.get(leaf, leaf), parameter


def plain_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, nn.Parameter]]:
    """Yield (name in a plain model, module, name there, parameter), under all names of a tied one."""
    for path, module in plain_modules(model):
        for leaf, parameter in plain_parameters(module):
            yield joined(path, leaf), module, leaf, parameter


def plain_tensors(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Tensor]:
    """Return name in a plain model -> each parameter and buffer, under all names of a tied one; without masks.

    Args:
        modules: pairs of a name and a module, as `plain_modules` yields them.
    """
    found: dict[str, Tensor] = {}
    for path, module in modules:
        masks = {id(stored(module, leaf)[1]) for leaf in pruned_names(module)}
        for leaf, tensor in [*plain_parameters(module), *module._buffers.items()]:
            if tensor is not None and id(tensor) not in masks:
                found[f"{path}.{leaf}" if path else leaf] = tensor
    return found


def joined(*parts: str) -> str:
    """Join parts of a name by dots, without empty ones."""
    return ".".join(part for part in parts if part)


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each name of a tensor -> its first name, another one only for tied tensors."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model without the wrappers of `torch.compile`, `nn.DataParallel` and `DistributedDataParallel`.

    Raises:
        TypeError: the model is no module, or one that torch.jit compiled.
    """
    if not isinstance(model, nn.Module) or isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"`model` (a {type(model).__name__}) must be an nn.Module; pass it as it was before torch.jit.")
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or (
        list(model._modules) == ["_orig_mod"]
    ):
        (model,) = model.children()
    return model


def plain_modules(
    model: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield (name, module) like `named_modules`, without wrappers and their parts of the names."""
    seen, module = set() if seen is None else seen, unwrapped(model)
    if module not in seen:
        seen.add(module)
        yield path, module
        for name, child in module.named_children():
            yield from plain_modules(child, f"{path}.{name}" if path else name, seen)


def place(model: nn.Module, name: str, shape: Sequence[int]) -> tuple[nn.Module, str]:
    """Find a parameter by its name in `model`, check it, and return its module and its name in that module.

    Wrappers of `torch.compile`, `nn.DataParallel` and `DistributedDataParallel` are not part of a name.
    """
    *path, leaf = name.split(".")
    try:
        module = unwrapped(model)
        for step in path:
            module = unwrapped(module.get_submodule(step))
        parameter = module._parameters.get(leaf, module._parameters.get(orig_name(leaf)))
    except AttributeError:
        parameter = None
    if parameter is None:
        raise ValueError(
            f"`{name}` is in the masks, but {type(model).__name__} has no such parameter; use masks of this model."
        )
    check_prunable(name, parameter)
    if parameter.shape != torch.Size(shape):
        raise ValueError(
            f"`{name}` has the shape {tuple(parameter.shape)} in the model but {tuple(shape)} in the masks; use masks "
            "of this model."
        )
    return module, leaf


def check_has_shape(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` for a parameter of a lazy layer that was not called yet."""
    if isinstance(tensor, UninitializedParameter):
        raise ValueError(
            f"`{name}` (of a lazy layer) has no shape before its first call; call the network with an input once, such "
            "as model(example), before all else."
        )


def check_has_values(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` if a tensor is on the meta device, where tensors have no values, or of a lazy layer."""
    check_has_shape(name, tensor)
    if tensor.is_meta:
        raise ValueError(
            f"`{name}` is on the meta device and has no values; load values first, for example with "
            "`model.load_state_dict(state, assign=True)`."
        )


PRUNABLE = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)
"""Dtypes of weights whose magnitudes and zeros mean what the network computes with."""


def check_prunable(name: str, tensor: Tensor, *, reader: str = "") -> None:
    """Raise `ValueError` if a tensor's numbers cannot be pruned, for example codes of a quantised weight.

    Args:
        name: name of the tensor, for the error.
        tensor: the tensor.
        reader: what computes with real numbers only; "" if complex ones may be pruned.
    """
    check_has_shape(name, tensor)
    if tensor.dtype not in PRUNABLE:
        raise ValueError(
            f"`{name}` (of {tensor.dtype}) cannot be pruned: it must hold floats of at least 16 bits, or complex "
            "numbers of at least 64, because the 0 of a quantised or packed number need not stand for 0; prune before "
            "the network is quantised, or leave it out of `parameters`, in a sweep by prune.exclude."
        )
    if reader and tensor.is_complex():
        raise ValueError(
            f"`{name}` (of {tensor.dtype}) must hold real numbers for {reader}; prune it by 'magnitude', 'lamp', "
            "'random' or a mask, or leave this tensor out."
        )


def check_all_have_values(model: nn.Module) -> None:
    """Raise `ValueError` if a parameter or buffer of a network is on the meta device."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        check_has_values(name, tensor)


def check_masks(masks: object) -> None:
    """Raise `TypeError` unless masks map names of parameters to tensors."""
    entries = masks.items() if isinstance(masks, Mapping) else [("", None)]
    for name, mask in entries:
        if not isinstance(masks, Mapping) or not isinstance(name, str) or not isinstance(mask, Tensor):
            given = f"with {name!r}: {mask!r}" if isinstance(masks, Mapping) else f"={masks!r}"
            raise TypeError(
                f"`masks` ({given[:200]}) must map names of parameters to tensors; pass a MaskSet, or a dict such as "
                "{'fc.weight': mask}."
            )


def check_tensor(value: object, name: str) -> None:
    """Raise `TypeError` unless the argument `name` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, not {type(value).__name__}; convert it with `torch.as_tensor`.")


def check_generator(generator: object) -> None:
    """Raise `TypeError` unless a source of random draws is a generator, or None."""
    if not isinstance(generator, torch.Generator | None):
        raise TypeError(
            f"`generator` (={generator!r}) must be a torch.Generator, not {type(generator).__name__}; pass "
            "torch.Generator().manual_seed(seed)."
        )


def check_same_shape(scores: Tensor, tensor: Tensor, name: str) -> None:
    """Check that `scores` are a dense tensor with the shape and the device of `tensor`.

    Raises:
        TypeError: `scores` are no tensor.
        ValueError: `scores` are sparse, or have another device or another shape.
    """
    check_tensor(scores, "importance_scores")
    if scores.layout != torch.strided:
        raise ValueError(f"`importance_scores` ({scores.layout}) must be a dense tensor; pass `scores.to_dense()`.")
    if scores.device != tensor.device:
        raise ValueError(
            f"`importance_scores` (on {scores.device}) must be on the device of `{name}`, {tensor.device}; "
            f"pass `scores.to('{tensor.device}')`."
        )
    if scores.shape != tensor.shape:
        raise ValueError(
            f"`importance_scores` (of shape {tuple(scores.shape)}) must have the shape of `{name}`, "
            f"{tuple(tensor.shape)}."
        )
