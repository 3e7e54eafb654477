"""Scores of the gradient of the mean loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pruning.scores.data import Batches, Loss, Size, mean_gradient
from pruning.scores.network import BatchNormMode, Masks, network


def gradient(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    size: Size = None,
    generator: torch.Generator | None = None,
    masks: Masks | None = None,
    parameters: Iterable[str] | None = None,
    batch_norm: BatchNormMode = "train",
) -> dict[str, Tensor]:
    """Score each entry by the magnitude of its gradient, of pruned entries too.

        score_i = |g_i|,        g = dL/dv, L the mean loss over all batches, v = m w

    Args and errors: see `pruning.scores`.
    """
    with network(model, masks, parameters, batch_norm=batch_norm) as net:
        return {name: g.abs_() for name, g in mean_gradient("gradient", net, batches, loss, size).items()}


def snip(
    model: nn.Module,
    batches: Batches,
    loss: Loss,
    *,
    size: Size = None,
    generator: torch.Generator | None = None,
    masks: Masks | None = None,
    parameters: Iterable[str] | None = None,
    batch_norm: BatchNormMode = "train",
) -> dict[str, Tensor]:
    """Score each entry by the sensitivity of the loss to its mask: SNIP (Lee et al. 2019, arXiv 1810.02340).

        score_i = |dL/dm_i| = |w_i g_i|,        g = dL/dv at v = m w, L the mean loss over all batches

    The paper divides by the sum of all scores, which changes no ranking. Of a network that is pruned already, what is
    pruned is scored by the value that the model still has of it: FORCE (de Jorge et al. 2021, arXiv 2006.09081) lets it
    return, iterative SNIP does not.

    Args and errors: see `pruning.scores`.
    """
    with network(model, masks, parameters, batch_norm=batch_norm) as net:
        means = mean_gradient("snip", net, batches, loss, size)
        return {name: g.mul_(net.weights[name].stored).abs_() for name, g in means.items()}
