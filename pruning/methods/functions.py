"""Functions that apply, remove and detect pruning; those of one parameter return the module that they were given.

All take the keywords of `BasePruningMethod.apply`: `importance_scores` (the parameter's shape; None takes the
parameter) and `generator` (None is torch's default), and raise what it raises: the module is then as it was.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from pruning.amount import Amount
from pruning.holding.parameter import ModuleParameter, drop_vacated, is_pruning_hook, plain_modules, pruned_names
from pruning.methods.structured import LnStructured, RandomStructured
from pruning.methods.unstructured import CustomFromMask, Identity, L1Unstructured, RandomUnstructured
from pruning.selection.channel_masks import Norm

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def identity(
    module: ModuleT, name: str, *, importance_scores: Tensor | None = None, generator: torch.Generator | None = None
) -> ModuleT:
    """Reparameterize `module.name` with a mask of ones: prune nothing."""
    Identity.apply(module, name, importance_scores=importance_scores, generator=generator)
    return module


def random_unstructured(
    module: ModuleT,
    name: str,
    amount: Amount,
    *,
    importance_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the unpruned entries of `module.name` at random (see `RandomUnstructured`)."""
    RandomUnstructured.apply(module, name, amount, importance_scores=importance_scores, generator=generator)
    return module


def l1_unstructured(
    module: ModuleT,
    name: str,
    amount: Amount,
    importance_scores: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the unpruned entries of `module.name`, the smallest in magnitude (see `L1Unstructured`)."""
    L1Unstructured.apply(module, name, amount, importance_scores, generator=generator)
    return module


def random_structured(
    module: ModuleT,
    name: str,
    amount: Amount,
    dim: int,
    *,
    importance_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the channels of `module.name` along `dim` at random (see `RandomStructured`)."""
    RandomStructured.apply(module, name, amount, dim, importance_scores=importance_scores, generator=generator)
    return module


def ln_structured(
    module: ModuleT,
    name: str,
    amount: Amount,
    n: Norm,
    dim: int,
    importance_scores: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the channels of `module.name` along `dim`, those of smallest L_n norm (see `LnStructured`)."""
    LnStructured.apply(module, name, amount, n, dim, importance_scores, generator=generator)
    return module


def custom_from_mask(
    module: ModuleT,
    name: str,
    mask: Tensor,
    *,
    importance_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `module.name` where `mask` (its shape, zeros and ones) is 0, on top of what is pruned already."""
    CustomFromMask.apply(module, name, mask, importance_scores=importance_scores, generator=generator)
    return module


def remove(module: ModuleT, name: str) -> ModuleT:
    """Make the pruning of `module.name` permanent.

    `name` is a parameter again, the same object as `name_orig` was, with zeros where the mask was 0; the mask and the
    hook are gone. The pruning itself is not undone. Hooks of `torch.nn.utils.prune` are removed as well.

    Raises:
        ValueError: `module.name` is not pruned.
    """
    try:
        parameter = ModuleParameter.of(module, name)
    except AttributeError as error:
        raise ValueError(str(error)) from error
    parameter.release()
    drop_vacated(module)
    return module


def remove_all(model: nn.Module) -> None:
    """Make the pruning of a network permanent: plain parameters with zeros, the same objects, and no hooks."""
    for _, module in plain_modules(model):
        for name in pruned_names(module):
            remove(module, name)


def is_pruned(module: nn.Module) -> bool:
    """Say whether `module` or a module in it has a parameter that is held pruned, by this package or by torch."""
    return any(
        is_pruning_hook(hook) for submodule in module.modules() for hook in submodule._forward_pre_hooks.values()
    )
