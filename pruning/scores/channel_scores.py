"""Scores of channels: by the scales of BatchNorm, and by distances between filters."""

from __future__ import annotations

import torch
from torch import Tensor

from pruning.scores.readings.network import weights_of
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.scores.taylor_forms import scales
from pruning.selection.channel_masks import check_dim


def bn_scale(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each channel by the scale of the BatchNorm after it: network slimming (Liu 2017, arXiv 1708.06519).

        score_c = |gamma_c|

    Scales tell channels apart after a training that penalises them. Names are those of the scales, as in "bn1.weight".

    Raises:
        ValueError: the network has no BatchNorm with a scale.
    """
    names = scales(given.model, given.parameters, "bn_scale")
    return {name: weight.value.abs() for name, weight in weights_of(given.model, given.masks, names).items()}


def fpgm(
    given: ScoringInput,
    *,
    dim: int = 0,
) -> dict[str, Tensor]:
    """Score each filter by its distances from the others: FPGM (He et al. 2019, arXiv 1811.00250).

        score_i = sum over j of ||W_i - W_j||_2,        i and j the filters of a tensor of which anything is kept

    The filter nearest to the geometric median of all goes first. Scores are 0 for filters that are pruned, and do not
    compare between tensors. They have one dimension, that of the filters.

    Args:
        dim: along which a tensor is cut into filters.
    """
    return {name: _distances(weight.value, dim) for name, weight in given.weights().items()}


def _distances(value: Tensor, dim: int) -> Tensor:
    filters = value.movedim(check_dim(value, dim), 0).flatten(1).to(torch.float64)
    alive = (filters != 0).any(1)
    scores = filters.new_zeros(len(filters))
    survivors = filters[alive]
    # Not by way of products, which cancel for filters that are near to each other.
    scores[alive] = torch.cdist(survivors, survivors, compute_mode="donot_use_mm_for_euclid_dist").sum(1)
    return scores
