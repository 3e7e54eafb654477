"""Commit a plan to a network, compute its sparsity, and find kept entries on dead paths."""

from __future__ import annotations

import torch
from torch import nn

from pruning.engine.plans import Plan
from pruning.holding.parameter import plain_modules, plain_tensors
from pruning.holding.reparam import held
from pruning.masks.mask_set import MaskSet
from pruning.scores.readings.network import Masks, weights_of
from pruning.scores.readings.scoring_data import Batches, ScoringInput
from pruning.scores.synaptic_flow import synflow


def commit(model: nn.Module, plan: Plan) -> None:
    """Apply a plan to a network: all masks and values, or none if an error is raised.

    The parameters are stored as by `torch.nn.utils.prune`: `name_orig` keeps all values, `name_mask` is the mask.

    Args:
        model: the network that the plan was made for, or one with equal names and shapes.
        plan: its masks replace the masks before.

    Raises:
        ValueError: a parameter or buffer is missing or has another shape; the message names it, and nothing is changed.
    """
    found = plain_tensors(plain_modules(model))
    for name, value in plan.values.items():
        if name not in found or found[name].shape != value.shape:
            actual = f"the tensor has shape {tuple(found[name].shape)}" if name in found else "the tensor is missing"
            raise ValueError(
                f"`plan.values[{name!r}]` of shape {tuple(value.shape)} does not fit {type(model).__name__}, where "
                f"{actual}; make the plan for this model."
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
    """Return the fraction of prunable weights that are masked, or exactly 0 in a tensor without a mask.

    Prunable are the weights of linear and convolutional layers and of attention's projections, and all other tensors
    that have a mask; a tied tensor counts once. `prune` counts only masks, so the target given to `prune` may be lower
    than this fraction for a network with zeros but no masks. The sparsity of a network without entries is 0.
    """
    names = dict.fromkeys([*weights_of(model), *MaskSet.collect(model)])
    weights = weights_of(model, parameters=names).values()
    kept = {id(w.parameter): (w.stored != 0) if w.kept is None else w.kept for w in weights}
    total = sum(mask.numel() for mask in kept.values())
    return (total - sum(int(mask.sum()) for mask in kept.values())) / max(1, total)


def effective_sparsity(model: nn.Module, batches: Batches = None, *, masks: Masks | None = None) -> float:
    """Return the fraction of prunable weights that are pruned, 0, or on a dead path.

    An entry v is alive if its score in SynFlow's network of magnitudes is positive: |v| dR/d|v| > 0.

    Args:
        model: pruned or not; its functions must scale with their input, see `pruning.scores.synflow`.
        batches: give the shape of an input; needed if the first layer is not linear.
        masks: masks in addition to those of the model.
    """
    flows = synflow(ScoringInput(model, batches, masks=masks))
    total = sum(weight.parameter.numel() for weight in weights_of(model, masks).values())
    return (total - sum(int((flow > 0).sum()) for flow in flows.values())) / max(1, total)
