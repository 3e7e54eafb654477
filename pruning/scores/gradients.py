"""Gradient scores: gradient magnitude, SNIP and GraSP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pruning.scores.readings.network import BatchNormMode, in_single_precision
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    at_least_float32,
    checked_batches,
    gradients,
    loss_of,
    mean_gradient,
    mean_over_batches,
    outputs_through,
    weighted_batches,
)


def gradient(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
) -> dict[str, Tensor]:
    """Score each entry, pruned or not, by the magnitude of its gradient.

    score_i = |g_i|,        g = dL/dv, L the mean loss over all batches, v = m w
    """
    with given.network(batch_norm) as net:
        return {name: g.abs_().to(torch.float64) for name, g in mean_gradient("gradient", net, given).items()}


def snip(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
) -> dict[str, Tensor]:
    """Score each entry by the sensitivity of the loss to its mask: SNIP (Lee et al. 2019, arXiv 1810.02340).

        score_i = |dL/dm_i| = |w_i g_i|,        g = dL/dv at v = m w, L the mean loss over all batches

    The paper divides by the sum of all scores, which changes no ranking. In a pruned network, a pruned entry is scored
    by the value that the model still stores: FORCE (de Jorge et al. 2021, arXiv 2006.09081) lets such entries return,
    iterative SNIP does not.
    """
    with given.network(batch_norm) as net:
        means = mean_gradient("snip", net, given)
        return {
            name: at_least_float32(g).mul_(net.weights[name].stored).abs_().to(torch.float64)
            for name, g in means.items()
        }


def grasp(
    given: ScoringInput,
    *,
    batch_norm: BatchNormMode = "train",
    temperature: float = 200.0,
) -> dict[str, Tensor]:
    """Score each entry by its contribution to the gradient flow: GraSP (Wang et al. 2020, arXiv 2002.07376); signed.

        score_i = w_i (H g)_i,      L the mean loss of outputs / temperature, g and H in the scored weights only

    The paper prunes the highest S = -w (H g), which are the same entries. Removing entry i changes |g|^2 by about
    -2 score_i.

    The model must return a tensor, or an object or mapping with a tensor `logits`.

    Args:
        temperature: above 0.
    """
    with given.network(batch_norm) as net, sdpa_kernel(SDPBackend.MATH):  # the others have no second derivatives
        in_single_precision(net.model)
        held = [
            batch for batch, _ in weighted_batches("grasp", checked_batches("grasp", net, given.batches), given.size)
        ]
        weights = list(net.parameters.values())

        def slopes(batch: Any, *, create_graph: bool = False) -> list[Tensor]:
            with outputs_through("grasp", net.model, lambda outputs: outputs / temperature):
                value = loss_of("grasp", given.loss, net.model, batch)
            return gradients(value, weights, create_graph=create_graph)

        mean = mean_over_batches("grasp", held, given.size, slopes) if len(held) > 1 else None

        def hessian_products(batch: Any) -> list[Tensor]:
            own = slopes(batch, create_graph=True)
            along = (
                [g.detach() for g in own]
                if mean is None
                else [g.to(w.dtype) for g, w in zip(mean, weights, strict=True)]
            )
            product = torch.stack([torch.sum(a * b) for a, b in zip(own, along, strict=True)]).sum()
            return gradients(product, weights) if product.requires_grad else [torch.zeros_like(w) for w in weights]

        products = mean_over_batches("grasp", held, given.size, hessian_products)
        owners = net.weights.values()
        scores = [p.mul_(owner.stored).to(torch.float64) for p, owner in zip(products, owners, strict=True)]
        return dict(zip(net.weights, scores, strict=True))
