"""Each layer's survivors refit, so that on scoring data its outputs come nearest to what they were."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pruning.repair.passes import is_layer, passes, rows_of
from pruning.scores.readings.network import Network
from pruning.scores.readings.scoring_data import ScoringInput


def least_squares(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
    *,
    damping: float = 0.01,
) -> dict[str, Tensor]:
    """Return new weights of linear and convolutional layers, each refit on the inputs that it had before.

        for each row w of a weight:     v = argmin (v - w)^T H (v - w)  with v_j = 0 where j is pruned,
        H = 2 / N X^T X + damping mean(diag) I,      X the layer's N inputs (patches, of a convolution)

    so v_S = w_S + [H_SS]^-1 H_SZ w_Z for survivors S and pruned Z. Biases stay.

    Args:
        given: the network before this pruning, with the masks before it; its parameters are those of `kept`.
        kept: name -> what is kept now, nonzero, of the parameter's shape.
        damping: above 0, a fraction of the mean of the diagonal.

    Returns:
        name -> tensor of the parameter's shape and dtype, 0 where it is pruned.

    Raises:
        ValueError: a parameter is not the weight of a linear or convolutional layer.
    """
    with given.network() as net:
        products = _products(net, given)
        return {name: _refit(net.weights[name].value, mask, products[name], damping) for name, mask in kept.items()}


def _products(net: Network, given: ScoringInput) -> dict[str, Tensor]:
    """Return name -> 2 / N X^T X of the weight's layer, (groups, weights of a row, the same)."""
    now: dict[str, Tensor] = {}
    for name in net.parameters:
        module = net.module_of(name)
        if not is_layer(module) or not name.endswith("weight"):
            raise ValueError(
                f"`repair.kind` (='least_squares') refits linear and convolutional layers, but {name!r} belongs to a "
                f"{type(module).__name__}; leave it out, or choose another repair."
            )

        def note(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
            rows = rows_of(module, inputs[0])
            now[name] = now.get(name, 0) + rows.mT @ rows * (2 / rows.shape[1])

        module.register_forward_pre_hook(note)
    totals: dict[str, Tensor] = {}
    weights = 0.0
    for weight in passes("least_squares", net, given):
        if missing := net.parameters.keys() - now.keys():
            raise ValueError(
                f"`batches` do not reach {min(missing)!r}, whose inputs least_squares needs; leave it out."
            )
        totals = {name: totals.get(name, 0) + product * weight for name, product in now.items()}
        weights += weight
        now.clear()
    return {name: total / weights for name, total in totals.items()}


def _refit(weight: Tensor, kept: Tensor, products: Tensor, damping: float) -> Tensor:
    groups, width = products.shape[:2]
    rows = weight.to(torch.float64).reshape(groups, -1, width)
    keeps = (kept.to(weight.device) != 0).reshape(rows.shape)
    fitted = torch.zeros_like(rows)
    for group, product in enumerate(products):
        product.diagonal().add_(damping * product.diagonal().mean())
        for index, (row, keep) in enumerate(zip(rows[group], keeps[group], strict=True)):
            if keep.any():
                removed = product[keep][:, ~keep] @ row[~keep]
                update = torch.linalg.solve(product[keep][:, keep], removed)
                fitted[group, index, keep] = row[keep] + update
    return fitted.view_as(weight).to(weight.dtype)
