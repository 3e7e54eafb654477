"""Least squares on the survivors of a layer, for masks that another method chose."""

from __future__ import annotations

import torch

from pruning.reconstruction.layer_problem import LayerProblem, Solution


def least_squares(problem: LayerProblem, *, damping: float = 0.01) -> Solution:
    """Refit the survivors of each row so that the layer's outputs change least; no further entry is pruned.

        v_S = w_S + [Hc_SS]^-1 Hc_SZ w_Z,      Hc = H + damping mean(diag H) I

    with S the survivors of a row w, and Z its pruned entries, whose weights are those of before the pruning.

    Args:
        problem: the layer; its target is not read.
        damping: fraction of the mean of the diagonal, above 0.

    Raises:
        ValueError: the statistics are not positive definite.
    """
    hessian, weight, kept = problem.damped(damping), problem.weight, problem.kept
    found = weight.masked_fill(~kept, 0)
    for row, survives in enumerate(kept):
        inside, gone = survives.nonzero()[:, 0], (~survives).nonzero()[:, 0]
        if not len(inside) or not len(gone):
            continue
        columns = hessian[inside]
        factor, failed = torch.linalg.cholesky_ex(columns[:, inside])
        if int(failed):
            raise ValueError("the statistics of its inputs are not positive definite; pass a larger `damping`.")
        missing = columns[:, gone] @ weight[row, gone]
        found[row, inside] += torch.cholesky_solve(missing[:, None], factor)[:, 0]
    return Solution(found, kept)
