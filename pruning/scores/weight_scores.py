"""Scores that read only the weights: magnitude, LAMP, BatchNorm scales, distances of filters; and random scores."""

from __future__ import annotations

import torch
from torch import Tensor

from pruning.scores.readings.network import weights_of
from pruning.scores.readings.scoring_data import ScoringInput
from pruning.scores.taylor_forms import batch_norm_scales
from pruning.selection.channel_masks import check_dim


def magnitude(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by its magnitude (Han et al. 2015, arXiv 1506.02626).

    score_i = |v_i|         0 for pruned entries
    """
    return {name: weight.value.abs() for name, weight in given.weights().items()}


def random(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by a number drawn uniformly from [0, 1), in the order of the model's parameters.

    `generator` must be on the CPU. None draws the next numbers of torch's default generator without advancing it, so
    that the next call draws the same numbers.
    """
    generator = given.generator
    if generator is None:
        generator = torch.Generator()
        generator.set_state(torch.get_rng_state())
    return {
        name: torch.rand(weight.parameter.shape, generator=generator, dtype=torch.float64).to(weight.parameter.device)
        for name, weight in given.weights().items()
    }


def lamp(
    given: ScoringInput,
) -> dict[str, Tensor]:
    """Score each entry by its share of the squares of its tensor that are not smaller (Lee 2021, arXiv 2010.07611).

        score_i = v_i^2 / (sum of v_j^2 over all j of the same or a higher rank)        0 for 0 / 0

    Ranking these scores globally prunes each tensor by magnitude and also decides each tensor's density. The largest
    entry of a tensor scores 1. Entries of equal magnitude rank by index.

    Raises:
        ValueError: a weight is NaN or infinite.
    """
    return {name: _lamp(name, weight.value) for name, weight in given.weights().items()}


def _lamp(name: str, value: Tensor) -> Tensor:
    magnitudes = value.abs().to(torch.float64).flatten()
    if magnitudes.numel() and not magnitudes.max().isfinite():
        raise ValueError(f"`{name}` holds NaN or infinity and must be finite for `lamp`; repair the tensor.")
    ordered, order = magnitudes.sort(stable=True)
    squares = ordered.square_()
    above = squares.flip(0).cumsum(0).flip(0)
    shares = torch.where(above > 0, squares / above, 0.0)
    return torch.empty_like(shares).scatter_(0, order, shares).view(value.shape)


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
