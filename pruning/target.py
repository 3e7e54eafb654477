"""One parameter of one module, looked at for pruning: read everything, compute the mask, and only then commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from pruning.attention import make_live, make_plain
from pruning.base import (
    BasePruningMethod,
    applies_own_mask,
    check_same_shape,
    drawing_from,
    is_builtin,
    is_pruning_hook,
)
from pruning.container import appended, prune_survivors
from pruning.masking import masked
from pruning.reparam import Reparam, mask_name, orig_name, stored


@dataclass
class Target:
    """A parameter that may have been pruned before, by this package or by torch.

    `orig` is the parameter, `mask` its mask so far (None if it was never pruned), `key` the place of its hook among
    the module's forward pre-hooks.
    """

    module: nn.Module
    name: str
    orig: nn.Parameter
    mask: Tensor | None
    key: int | None

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Target:
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
    def hook(self) -> BasePruningMethod | None:
        """The hook that holds the parameter now."""
        return None if self.key is None else cast(BasePruningMethod, self.module._forward_pre_hooks[self.key])

    def compute_mask(
        self, method: BasePruningMethod, importance_scores: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        """Return the mask after `method`, a new tensor."""
        if importance_scores is not None:
            check_same_shape(importance_scores, self.orig, self.label)
        if self.orig.is_meta:  # no entry has a value yet: as after a first call of torch's, the mask will be loaded
            return torch.ones_like(self.orig.detach()) if self.mask is None else self.mask.clone()
        try:
            if is_builtin(method):
                scores = self.orig if importance_scores is None else importance_scores
                if importance_scores is None and self.mask is not None and method.READS_PRUNED:
                    scores = masked(self.orig.detach(), self.mask)
                with drawing_from(method, generator):
                    if self.mask is None:
                        return method.first_mask(scores.detach(), self.orig.detach())
                    mask = self.copied_mask()
                    method.prune_(mask, scores.detach())
                return mask
            return self._custom_mask(method, importance_scores, generator)
        except ValueError as error:
            raise ValueError(f"Pruning {self.label}: {error}") from error

    def _custom_mask(
        self, method: BasePruningMethod, importance_scores: Tensor | None, generator: torch.Generator | None
    ) -> Tensor:
        if self.mask is None:
            scores = self.orig if importance_scores is None else importance_scores
            with drawing_from(method, generator):
                computed = method.compute_mask(scores, default_mask=torch.ones_like(self.orig))
            # A copy: what comes back may be cut from a larger tensor, which it would keep, or belong to someone else.
            mask = torch.empty_like(self.orig.detach()).copy_(computed.detach())
        else:
            scores = masked(self.orig, self.mask) if importance_scores is None else importance_scores
            mask = prune_survivors(method, scores, self.mask, generator).to(self.orig.dtype)
        if not torch.logical_or(mask == 0, mask == 1).all():
            raise ValueError(f"{type(method).__name__} must compute a mask of zeros and ones only.")
        return mask

    def copied_mask(self) -> Tensor:
        """Return a copy of the mask so far, to prune further in place."""
        return torch.ones_like(self.orig.detach()) if self.mask is None else self.mask.detach().clone()

    def commit(self, method: BasePruningMethod, mask: Tensor) -> BasePruningMethod:
        """Put `mask` in force and remember `method`; nothing before this has changed the module."""
        module, name = self.module, self.name
        reparam = getattr(self.hook, "_reparam", None) or Reparam(name)
        if self.hook is not None:
            self.hook._reparam = None  # it may become one method among others
        hook = appended(self.hook, method)
        hook._reparam = reparam
        make_live(module)
        if self.key is None:
            rename_parameter(module, name, orig_name(name))
            module.register_buffer(mask_name(name), mask)
            module.register_forward_pre_hook(hook)
        else:
            module._buffers[mask_name(name)] = mask
            module._forward_pre_hooks[self.key] = hook
        reparam.refresh(module)
        hook.publish_own(module)
        method.forget()
        return hook

    def release(self) -> None:
        """Make the pruning permanent and take everything away that `commit` has added."""
        if self.key is None or self.mask is None:
            raise ValueError(f"{self.label} has not been pruned, so its pruning cannot be removed.")
        module, name = self.module, self.name
        own = self.hook.apply_mask(module).detach() if applies_own_mask(self.hook) else None
        # New storage: tensors that share the old one keep their values.
        self.orig.data = masked(self.orig.detach(), self.mask) if own is None else own
        # A caller that walks the hooks (torch's own `remove`) deletes the key itself, so it must stay for now.
        module._forward_pre_hooks[self.key] = vacated
        make_plain(module)
        module.__dict__.pop(name, None)
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
