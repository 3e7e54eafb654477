"""Entries that are kept and do nothing: no path through survivors leads from the inputs to them and to the outputs."""

from __future__ import annotations

from torch import nn

from pruning.scores.readings.network import Masks, weights_of
from pruning.scores.readings.scoring_data import Batches, ScoringInput
from pruning.scores.synaptic_flow import synflow


def effective_sparsity(model: nn.Module, batches: Batches = None, *, masks: Masks | None = None) -> float:
    """Return the fraction of prunable weights that are pruned, or on dead paths, or 0.

    An entry is alive if something flows through it in SynFlow's network of magnitudes: |v| dR/d|v| > 0.

    Args:
        model: pruned or not; of functions that scale with their input, see `pruning.scores.synflow`.
        batches: for the shape of an input, where the first layer is not linear.
        masks: what is pruned besides.
    """
    flows = synflow(ScoringInput(model, batches, masks=masks))
    total = sum(weight.parameter.numel() for weight in weights_of(model, masks).values())
    return (total - sum(int((flow > 0).sum()) for flow in flows.values())) / max(1, total)
