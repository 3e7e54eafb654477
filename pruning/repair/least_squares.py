"""Updates of survivors after pruning: least squares on scoring data, and Optimal Brain Surgeon."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pruning.repair.batch_norm_statistics import is_layer, passes, rows_of
from pruning.scores.readings.fisher_matrix import FisherMatrix, fisher_matrix
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


def obs(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
    *,
    damping: float = 1e-5,
    block: int | None = None,
    matrix: FisherMatrix | None = None,
) -> dict[str, Tensor]:
    """Update survivors by the sum of the updates for single removals, then mask (Singh & Alistarh 2020).

        dw = - sum over pruned q of w_q F^-1 e_q / [F^-1]_qq,        F = damping I + mean over examples of g_n g_n^T

    The published code does the same. The sum is exact for one pruned entry; `obs_joint` is exact for any number.

    Args:
        given: the network and masks before this pruning; F covers its parameters, which are those of `kept`.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.
        damping: above 0.
        block: None takes the whole matrix; an int takes blocks of `block` consecutive entries of a row.
        matrix: F, if computed before; None computes it.

    Returns:
        name -> tensor of the parameter's shape and dtype, 0 at pruned entries.
    """
    before = given.weights()
    if matrix is None:
        matrix = fisher_matrix(given, damping=damping, block=block)
    diagonal = matrix.inverse_diagonal()
    removed = {n: torch.where(kept[n].to(w.value.device) != 0, 0.0, w.value / diagonal[n]) for n, w in before.items()}
    updates = matrix.solve({name: vector.to(torch.float64) for name, vector in removed.items()})
    return {n: _masked_sum(w.value, -updates[n], kept[n]) for n, w in before.items()}


def obs_joint(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
    *,
    damping: float = 1e-5,
    block: int | None = None,
    matrix: FisherMatrix | None = None,
) -> dict[str, Tensor]:
    """Update survivors by the change of least cost dw^T F dw / 2 that sets all pruned entries Q to 0.

        dw = - F^-1 E_Q ([F^-1]_QQ)^-1 w_Q

    See `obs` for the args and the result.
    """
    before = given.weights()
    if matrix is None:
        matrix = fisher_matrix(given, damping=damping, block=block)
    keeps = {name: (mask != 0).to(before[name].value.device) for name, mask in kept.items()}
    updates = matrix.joint_update({name: weight.value for name, weight in before.items()}, keeps)
    return {n: _masked_sum(w.value, updates[n], kept[n]) for n, w in before.items()}


def _masked_sum(value: Tensor, update: Tensor, kept: Tensor) -> Tensor:
    repaired = value.to(torch.float64) + update
    return torch.where(kept.to(value.device) != 0, repaired, 0.0).to(value.dtype)
