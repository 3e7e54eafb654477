"""Channel scores: the scales of BatchNorm layers, and distances between filters."""

from __future__ import annotations

import torch
from torch import Tensor

from pruning.scores.readings.network import weights_of
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.scores.taylor_forms import batch_norm_scales
from pruning.selection.channel_masks import check_dim


def bn_scale(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each channel by the scale of the BatchNorm after it: network slimming (Liu 2017, arXiv 1708.06519).

        score_c = |gamma_c|

    The scales separate channels only after training with a penalty on them. The names in the result are those of the
    scales, such as "bn1.weight".

    Raises:
        ValueError: the network has no BatchNorm with a scale.
    """
    names = batch_norm_scales(given.model, given.parameters, "bn_scale")
    return {name: weight.value.abs() for name, weight in weights_of(given.model, given.masks, names).items()}


def fpgm(
    given: ScoringInput,
    *,
    dim: int = 0,
) -> dict[str, Tensor]:
    """Score each filter by its distances from the others: FPGM (He et al. 2019, arXiv 1811.00250).

        score_i = sum over j of ||W_i - W_j||_2,        i and j the filters of a tensor with any nonzero entry

    The filter nearest to the geometric median of all filters is pruned first. Pruned filters score 0. Scores compare
    only within a tensor. Each tensor of scores has shape (filters,).

    Args:
        dim: the dimension that counts the filters.
    """
    return {name: _distances(weight.value, dim) for name, weight in given.weights().items()}


def _distances(value: Tensor, dim: int) -> Tensor:
    filters = value.movedim(check_dim(value, dim), 0).flatten(1).to(torch.float64)
    alive = (filters != 0).any(1)
    scores = filters.new_zeros(len(filters))
    survivors = filters[alive]
    # The matrix product form of distances loses precision by cancellation for filters near each other.
    scores[alive] = torch.cdist(survivors, survivors, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    return scores
