"""ALPS: masks and weights of one layer by the alternating direction method of multipliers."""

from __future__ import annotations

import torch
from torch import Tensor

from pruning.reconstruction.layer_problem import LayerProblem, Solution, lowest, lowest_of_windows


def alps(problem: LayerProblem, *, damping: float = 0.01, rounds: int = 300, refits: int = 10) -> Solution:
    """Prune a layer by ALPS: weights W and their sparse copy D approach each other while the penalty r grows.

        W <- (Hc + r I)^-1 (Hc W0 - V + r D),     D <- the largest entries of W + V / r,     V <- V + r (W - D)

    with Hc = H + damping mean(diag H) I, scaled to a diagonal of ones. r grows faster while the support of D changes
    more, and the search ends when it stays. Then least squares on the support, by `refits` steps of preconditioned
    conjugate gradients.

    Args:
        problem: the layer.
        damping: fraction of the mean of the diagonal, above 0.
        rounds: largest number of rounds.
        refits: steps of conjugate gradients.

    Source: Meng et al. 2024, arXiv 2406.07831.
    """
    scale = problem.damped(damping).diagonal().sqrt()
    hessian = problem.damped(damping) / scale / scale[:, None]
    first = (problem.weight * scale).masked_fill(problem.hessian.diagonal() == 0, 0)  # unused inputs go first
    values, vectors = torch.linalg.eigh(hessian)
    kept, dual, penalty = _support(first, problem), torch.zeros_like(first), 0.1
    sparse, seen = first * kept, kept
    product = first @ hessian
    for step in range(1, rounds + 1):
        dense = (product - dual + penalty * sparse) @ vectors / (values + penalty) @ vectors.mT
        raised = dense + dual / penalty
        kept = _support(raised, problem)
        sparse = raised * kept
        dual = dual + penalty * (dense - sparse)
        if step % 3 == 0:
            changed = int(torch.count_nonzero(kept ^ seen))
            if not changed:
                break
            seen, size = kept, max(1, int(torch.count_nonzero(kept)))
            penalty *= 1.3 if changed >= 0.1 * size else 1.2 if changed >= 0.005 * size else 1.1
    found = refit_by_gradients(sparse * kept, first, hessian, kept, refits)
    return Solution(found / scale, kept)


def refit_by_gradients(start: Tensor, weight: Tensor, hessian: Tensor, kept: Tensor, steps: int) -> Tensor:
    """Lower tr((V - W) H (V - W)^T) over V with the support `kept`, by conjugate gradients on all rows together.

    Args:
        start: first V, (rows, columns), 0 outside of the support.
        weight: W.
        hessian: H, with a diagonal of ones, which preconditions the steps.
        kept: bool, True in the support.
        steps: number of steps.
    """
    found = start.clone()
    residual = ((weight - found) @ hessian).masked_fill(~kept, 0)
    direction, norm = residual.clone(), residual.square().sum()
    for _ in range(steps):
        if not float(norm) > 0:
            break
        moved = (direction @ hessian).masked_fill(~kept, 0)
        length = norm / (direction * moved).sum()
        found += length * direction
        residual -= length * moved
        before, norm = norm, residual.square().sum()
        direction = residual + norm / before * direction
    return found


def _support(scores: Tensor, problem: LayerProblem) -> Tensor:
    magnitudes, target = scores.abs(), problem.target
    if target.m is not None and target.n is not None:
        return lowest_of_windows(magnitudes, problem.kept, target.n, target.m)
    return lowest(magnitudes, problem.kept, target.count(scores.numel()))
