"""Masks by scores of one layer."""

from __future__ import annotations

from pruning.reconstruction.layer_problem import (
    LayerProblem,
    Solution,
    lowest,
    lowest_of_rows,
    lowest_of_windows,
)


def wanda(problem: LayerProblem) -> Solution:
    """Prune each row's entries of lowest |w_j| sqrt(H_jj), without changes of the others: Wanda.

    Each row loses floor(sparsity inputs) entries; for windows, each keeps n of m.

    Source: Sun et al. 2023, arXiv 2306.11695.
    """
    scores = problem.weight.abs() * problem.hessian.diagonal().sqrt()
    target = problem.target
    if target.m is not None and target.n is not None:
        kept = lowest_of_windows(scores, problem.kept, target.n, target.m)
    else:
        rate = target.sparsity if target.by_row is None else target.by_row
        count = int(rate * problem.weight.shape[1] + 1e-9)
        kept = lowest_of_rows(scores, problem.kept, count)
    return Solution(problem.weight.masked_fill(~kept, 0), kept)


def magnitude(problem: LayerProblem) -> Solution:
    """Prune the layer's smallest |w|; for windows, each keeps its n largest of m."""
    scores, target = problem.weight.abs(), problem.target
    if target.m is not None and target.n is not None:
        kept = lowest_of_windows(scores, problem.kept, target.n, target.m)
    else:
        kept = lowest(scores, problem.kept, target.count(scores.numel()))
    return Solution(problem.weight.masked_fill(~kept, 0), kept)
