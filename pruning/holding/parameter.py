"""One parameter of one module: look at it, hold it under a mask, let it go again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeGuard, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.holding.attention import make_live, make_plain
from pruning.holding.masking import masked
from pruning.holding.reparam import Reparam, mask_name, orig_name, stored


@dataclass
class ModuleParameter:
    """A parameter that may have been pruned before, by this package or by torch.

    `orig` is the parameter, `unchecked_mask` what is stored as its mask (None if it was never pruned), `key` the place
    of its hook among the module's forward pre-hooks.
    """

    module: nn.Module
    name: str
    orig: nn.Parameter
    unchecked_mask: Tensor | None
    key: int | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> ModuleParameter:
        """Find the parameter `name` of `module`, pruned or not, and check that it can be pruned (again)."""
        if not isinstance(cast(object, module), nn.Module):
            raise TypeError(f"`module` (={module!r}) must be an nn.Module, not {type(module).__name__}.")
        key = hook_key(module, name)
        if key is not None:
            orig, mask = stored(module, name)
            return cls(module, name, cast(nn.Parameter, orig), mask, key)
        parameter = module._parameters.get(name)
        if parameter is None:
            raise AttributeError(
                f"`name` (={name!r}) must be a parameter of {type(module).__name__}; "
                f"it has {', '.join(repr(key) for key, p in module._parameters.items() if p is not None) or 'none'}."
            )
        for taken in (orig_name(name), mask_name(name)):
            if hasattr(module, taken):
                raise AttributeError(f"{type(module).__name__} already has an attribute {taken!r}; rename it first.")
        return cls(module, name, parameter, None, None)

    @property
    def label(self) -> str:
        """The tensor's name in error messages."""
        return f"{type(self.module).__name__}.{self.name}"

    @property
    def hook(self) -> Any:
        """The pruning method that holds the parameter now, None if there is none."""
        return None if self.key is None else self.module._forward_pre_hooks[self.key]

    @property
    def mask(self) -> Tensor | None:
        """The mask so far, None if there is none; see `Reparam.check` for what it raises."""
        reparam = getattr(self.hook, "_reparam", None)
        if reparam is not None and self.unchecked_mask is not None:
            reparam.check(self.module, self.unchecked_mask)
        return self.unchecked_mask

    def copied_mask(self) -> Tensor:
        """Return a copy of the mask so far, to prune further in place."""
        return torch.ones_like(self.orig.detach()) if self.mask is None else self.mask.detach().clone()

    def hold(self, hook: Any, mask: Tensor, own: Callable[[nn.Module], Tensor] | None = None) -> None:
        """Put `mask` in force, and `hook` in the place of the one before; nothing before this has changed the module.

        The hook is a forward pre-hook that calls the `Reparam` it is given as `_reparam`; `own` is the `apply_mask` of
        a subclass that has its own.
        """
        module, name = self.module, self.name
        reparam = getattr(self.hook, "_reparam", None) or Reparam(name)
        if self.key is not None:
            self.hook._reparam = None  # it may become one method among others
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
        reparam.refresh(module)

    def release(self) -> None:
        """Take everything away that `hold` has added, and leave the values that `name` reads."""
        if self.key is None or self.mask is None:
            raise ValueError(f"{self.label} has not been pruned, so its pruning cannot be removed.")
        module, name = self.module, self.name
        reparam = getattr(self.hook, "_reparam", None)
        own = None if reparam is None else reparam.own
        # New storage: tensors that share the old one keep their values.
        self.orig.data = masked(self.orig.detach(), self.mask) if own is None else own(module).detach()
        # A caller that walks the hooks (torch's own `remove`) deletes the key itself, so it must stay for now.
        module._forward_pre_hooks[self.key] = vacated
        make_plain(module)
        del module._buffers[mask_name(name)]
        rename_parameter(module, orig_name(name), name)
        setattr(module, name, self.orig)  # not only registered: an RNN keeps its own list


def hook_key(module: nn.Module, name: str) -> int | None:
    """Return the key of the pruning hook of `name` among the forward pre-hooks of `module`, torch's included."""
    for key, hook in module._forward_pre_hooks.items():
        if is_pruning_hook(hook) and getattr(hook, "_tensor_name", None) == name:
            return key
    return None


def vacated(module: nn.Module, _inputs: object) -> None:
    """Stand in for a hook that was removed, and leave with the first forward."""
    drop_vacated(module)


def drop_vacated(module: nn.Module) -> None:
    """Forget the hooks that were removed."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook is vacated]:
        del module._forward_pre_hooks[key]


def rename_parameter(module: nn.Module, old: str, new: str) -> None:
    """Rename a parameter where it stands: optimizers and saved states go by the order of the parameters."""
    renamed = [(new if name == old else name, parameter) for name, parameter in module._parameters.items()]
    module._parameters.clear()
    module._parameters.update(renamed)


def is_pruning_hook(hook: object) -> TypeGuard[torch_prune.BasePruningMethod]:
    """Say whether `hook` is a pruning method, of this package or of torch (which accepts ours as its own)."""
    return isinstance(hook, torch_prune.BasePruningMethod)


def pruned_names(module: nn.Module) -> set[str]:
    """Return the names of the parameters of `module` itself that this package or torch's holds pruned."""
    return {str(hook._tensor_name) for hook in module._forward_pre_hooks.values() if is_pruning_hook(hook)}


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model that `torch.compile`, `nn.DataParallel` or `DistributedDataParallel` has wrapped, if one has."""
    while isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) or (
        list(model._modules) == ["_orig_mod"]
    ):
        (model,) = model.children()
    return model


def plain_modules(
    model: nn.Module, path: str = "", seen: set[nn.Module] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yield what `named_modules` does, without wrappers and their part in the names."""
    seen, module = set() if seen is None else seen, unwrapped(model)
    if module not in seen:
        seen.add(module)
        yield path, module
        for name, child in module.named_children():
            yield from plain_modules(child, f"{path}.{name}" if path else name, seen)


def place(model: nn.Module, name: str, shape: Sequence[int]) -> tuple[nn.Module, str]:
    """Return the module and the name in it of a parameter that has this name in `model`, and must have this shape.

    Wrappers of `torch.compile`, `nn.DataParallel` and `DistributedDataParallel` are no part of a name.
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
        raise ValueError(f"`{name}` is in the masks, but {type(model).__name__} has no such parameter.")
    if parameter.shape != torch.Size(shape):
        raise ValueError(
            f"`{name}` has the shape {tuple(parameter.shape)} in the model but {tuple(shape)} in the masks; "
            "they belong to another model."
        )
    return module, leaf


def check_has_values(name: str, tensor: Tensor) -> None:
    """Raise `ValueError` if a tensor is on the meta device, where it has a shape alone."""
    if tensor.is_meta:
        raise ValueError(
            f"`{name}` is on the meta device and has no values; load them first, as by "
            "`model.load_state_dict(state, assign=True)`."
        )


def check_all_have_values(model: nn.Module) -> None:
    """Raise `ValueError` if a parameter or buffer of a network is on the meta device."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        check_has_values(name, tensor)


def check_tensor(value: object, name: str) -> None:
    """Raise `TypeError` unless the argument `name` is a tensor."""
    if not isinstance(value, Tensor):
        raise TypeError(f"`{name}` must be a tensor, not {type(value).__name__}; convert it by `torch.as_tensor`.")


def check_same_shape(scores: Tensor, tensor: Tensor, name: str) -> None:
    """Raise `TypeError` unless `scores` are a tensor, `ValueError` unless they are dense, as `tensor` is, and there.

    They are there when they have its shape and its device.
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
