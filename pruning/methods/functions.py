"""Functions that apply, remove and detect pruning; functions for one parameter return their module.

All functions that prune take the keywords of `BasePruningMethod.apply`: `importance_scores` (of the parameter's shape;
None: the parameter) and `generator` (None: torch's default generator). They raise the errors of `apply`, and do not
change the module then.
"""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor, nn

from pruning.choices.axes import Amount
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
    """Prune `module.name` where `mask` (zeros and ones, of its shape) is 0, in addition to its earlier pruning."""
    CustomFromMask.apply(module, name, mask, importance_scores=importance_scores, generator=generator)
    return module


def remove(module: ModuleT, name: str) -> ModuleT:
    """Make the pruning of `module.name` permanent.

    `name` is a parameter again, the same object as `name_orig`, with zeros where the mask was 0. The mask and the hook
    are removed; pruned entries stay 0. Hooks of `torch.nn.utils.prune` are removed as well.

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
    """Make the pruning of a network permanent: parameters become plain, the same objects with zeros, without hooks."""
    for _, module in plain_modules(model):
        for name in pruned_names(module):
            remove(module, name)


def is_pruned(module: nn.Module) -> bool:
    """Return whether this package or torch pruned a parameter of `module` or of a module in it."""
    return any(
        is_pruning_hook(hook) for submodule in module.modules() for hook in submodule._forward_pre_hooks.values()
    )
