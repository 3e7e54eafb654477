"""Dead paths: kept entries without effect, because no path of survivors connects them to inputs and outputs."""

from __future__ import annotations

from torch import nn

from pruning.scores.readings.network import Masks, weights_of
from pruning.scores.readings.scoring_data import Batches, ScoringInput
from pruning.scores.synaptic_flow import synflow


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
