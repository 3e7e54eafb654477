"""Weight updates of Optimal Brain Surgeon, from the empirical Fisher matrix."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pruning.scores.readings.fisher_matrix import FisherMatrix, fisher_matrix
from pruning.scores.readings.scoring_data import ScoringInput


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
