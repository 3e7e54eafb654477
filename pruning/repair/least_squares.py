"""Least-squares repair: refit each layer's survivors so that its outputs on scoring data stay closest to before."""

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
    """Refit the weights of linear and convolutional layers, each on its inputs before this pruning.

        for each row w of a weight:     v = argmin (v - w)^T H (v - w)  with v_j = 0 where j is pruned,
        H = 2 / N X^T X + damping mean(diag) I,      X the layer's N inputs (for a convolution, patches)

    so v_S = w_S + [H_SS]^-1 H_SZ w_Z for survivors S and pruned Z. Biases do not change.

    Args:
        given: the network and masks before this pruning; its parameters are those of `kept`.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.
        damping: above 0, a fraction of the mean of the diagonal.

    Returns:
        name -> tensor of the parameter's shape and dtype, 0 at pruned entries.

    Raises:
        ValueError: a parameter is not the weight of a linear or convolutional layer.
    """
    with given.network() as net:
        products = _products(net, given)
        return {name: _refit(net.weights[name].value, mask, products[name], damping) for name, mask in kept.items()}


def _products(net: Network, given: ScoringInput) -> dict[str, Tensor]:
    """Return name -> 2 / N X^T X of the weight's layer, shape (groups, weights of a row, weights of a row)."""
    of_batch: dict[str, Tensor] = {}
    for name in net.parameters:
        module = net.module_of(name)
        if not is_layer(module) or not name.endswith("weight"):
            raise ValueError(
                f"`repair.kind` (='least_squares') refits linear and convolutional layers, but {name!r} belongs to a "
                f"{type(module).__name__}; leave the tensor out, or choose another repair."
            )

        def note(module: nn.Module, inputs: tuple[Tensor, ...], name: str = name) -> None:
            rows = rows_of(module, inputs[0])
            of_batch[name] = of_batch.get(name, 0) + rows.mT @ rows * (2 / rows.shape[1])

        module.register_forward_pre_hook(note)
    totals: dict[str, Tensor] = {}
    weights = 0.0
    for weight in passes("least_squares", net, given):
        if missing := net.parameters.keys() - of_batch.keys():
            raise ValueError(
                f"`repair.kind` (='least_squares') needs the inputs of {min(missing)!r}, but the network does not call "
                "its layer; leave the tensor out, or choose another repair."
            )
        totals = {name: totals.get(name, 0) + product * weight for name, product in of_batch.items()}
        weights += weight
        of_batch.clear()
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
