"""A plan put in force; and what holds of a whole network: its sparsity."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pruning.engine.plans import Plan
from pruning.holding.parameter import plain_modules, pruned_names
from pruning.holding.reparam import held, stored
from pruning.masks.mask_set import MaskSet
from pruning.scores.readings.network import plain_parameters, weights_of


def commit(model: nn.Module, plan: Plan) -> None:
    """Put a plan in force: every mask and every value, or nothing is changed.

    The parameters are held as by `torch.nn.utils.prune`: `name_orig` keeps all values, `name_mask` is the mask.

    Args:
        model: the network that the plan was made for, or one of its shapes.
        plan: its masks stand instead of those before.

    Raises:
        ValueError: a parameter or a buffer is missing or has another shape; it is named, and nothing is changed.
    """
    found = _tensors(model)
    for name, value in plan.values.items():
        if name not in found or found[name].shape != value.shape:
            has = f"of the shape {tuple(found[name].shape)}" if name in found else "missing"
            raise ValueError(
                f"`plan.values[{name!r}]` of shape {tuple(value.shape)} does not fit {type(model).__name__}, where it "
                f"is {has}; make the plan for this model."
            )
    before = {name: found[name].detach().clone() for name in plan.values}
    with torch.no_grad():
        try:
            for name, value in plan.values.items():
                found[name].copy_(value)
            plan.masks.apply(model, replace=True)
        except BaseException:
            for name, value in before.items():
                found[name].copy_(value)
            raise
    for module, reparam in held(model):
        reparam.refresh(module)


def sparsity(model: nn.Module) -> float:
    """Return the fraction of prunable weights that are pruned: masked, or exactly 0 where no mask is held.

    Prunable are the weights of linear and convolutional layers and of attention's projections, and whatever is held
    pruned besides; a tied one counts once. `prune` counts masks alone: of a plain network its target may lie below
    what this returns. Of no entries it is 0.
    """
    names = dict.fromkeys([*weights_of(model), *MaskSet.collect(model)])
    weights = weights_of(model, parameters=names).values()
    kept = {id(w.parameter): (w.stored != 0) if w.kept is None else w.kept for w in weights}
    total = sum(mask.numel() for mask in kept.values())
    return (total - sum(int(mask.sum()) for mask in kept.values())) / max(1, total)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return name in a plain model -> parameter or buffer, without masks."""
    found: dict[str, Tensor] = {}
    for path, module in plain_modules(model):
        masks = {id(stored(module, leaf)[1]) for leaf in pruned_names(module)}
        own = {**dict(plain_parameters(module)), **module._buffers}
        for leaf, tensor in own.items():
            if tensor is not None and id(tensor) not in masks:
                found[f"{path}.{leaf}" if path else leaf] = tensor
    return found
