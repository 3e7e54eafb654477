"""SparseGPT: columns are pruned from left to right, and the columns to the right make up for each."""

from __future__ import annotations

import torch
from torch import Tensor

from pruning.reconstruction.layer_problem import LayerProblem, Solution, lowest, lowest_of_rows


def sparsegpt(problem: LayerProblem, *, damping: float = 0.01, block: int = 128) -> Solution:
    """Prune a layer by SparseGPT.

    With Hc = H + damping mean(diag H) I and Hc^-1 = U^T U, U upper triangular, for each block of columns:

        mask: the lowest w^2 / U_jj^2 of the block, over all rows; for windows, n of m by row, at each window's start;
              for inputs that go together, the lowest sums
        for each column j:  e = w_j (1 - mask_j) / U_jj,      W[:, j:] -= e U[j, j:]

    so that the sum of e^2 is the error under Hc. Blocks round cumulatively: the total is exact. An input that is always
    0 goes first.

    Args:
        problem: the layer.
        damping: fraction of the mean of the diagonal, above 0.
        block: columns of a block.

    Source: Frantar & Alistarh 2023, arXiv 2301.00774.
    """
    target = problem.target
    weight, kept = problem.weight.clone(), problem.kept.clone()
    upper = inverse_factor(problem.damped(damping))
    unused = problem.hessian.diagonal() == 0
    alive, whole = problem.alive, target.m or target.size
    rows, size, pruned = len(alive), block - block % whole or whole, 0
    for start in range(0, weight.shape[1], size):
        end = min(start + size, weight.shape[1])
        part = slice(start, end)
        if target.m is None:
            first, last = start // target.size, end // target.size
            scores = (weight[:, part] / upper.diagonal()[part]).square_()
            scores[:, unused[part]] = 0
            scores = problem.by_unit(scores)
            later = int(torch.count_nonzero(~alive[:, last:]))  # units that are pruned already
            until = min(target.count(rows * last), target.count(alive.numel()) - later)
            alive[:, first:last] = lowest(scores, alive[:, first:last], max(0, until - pruned))
            kept[:, part] &= problem.spread(alive[:, first:last])
            pruned += int(rows * (last - first) - torch.count_nonzero(alive[:, first:last]))
        errors = _block(weight, kept, upper, start, end, problem, unused)
        weight[:, end:].sub_(errors @ upper[part, end:])
    return Solution(weight.masked_fill_(~kept, 0), kept)


def inverse_factor(hessian: Tensor) -> Tensor:
    """Return U, upper triangular, with H^-1 = U^T U.

    Raises:
        ValueError: H is not positive definite, or no number.
    """
    factor, failed = torch.linalg.cholesky_ex(hessian)
    if int(failed) or not bool(factor.isfinite().all()):
        raise ValueError("the statistics of its inputs are not positive definite; pass a larger `damping`.")
    inverse = torch.cholesky_inverse(factor)
    upper: Tensor
    upper, failed = torch.linalg.cholesky_ex(inverse, upper=True)
    if int(failed):
        raise ValueError("the statistics of its inputs are too close to singular; pass a larger `damping`.")
    return upper


def _block(
    weight: Tensor, kept: Tensor, upper: Tensor, start: int, end: int, problem: LayerProblem, unused: Tensor
) -> Tensor:
    """Prune the columns of a block in place; return the error e of each, (rows, columns of the block)."""
    target, columns = problem.target, weight[:, start:end]
    inside, masks = upper[start:end, start:end], kept[:, start:end]
    errors = torch.zeros_like(columns)
    for j in range(end - start):
        if target.m is not None and target.n is not None and j % target.m == 0:
            window = slice(j, j + target.m)
            scores = (columns[:, window] / inside.diagonal()[window]).square()
            scores[:, unused[start:end][window]] = 0
            masks[:, window] = lowest_of_rows(scores, masks[:, window], target.m - target.n)
        error = columns[:, j].masked_fill(masks[:, j], 0) / inside[j, j]
        columns[:, j:].addr_(error, inside[j, j:], alpha=-1)
        errors[:, j] = error
    return errors
