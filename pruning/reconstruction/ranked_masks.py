"""Masks by scores of one layer, and the refit of any mask by least squares."""

from __future__ import annotations

import torch
from torch import Tensor

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


def refit(problem: LayerProblem, kept: Tensor, damping: float = 0.01) -> Tensor:
    """Return the weights of least error under H + damping mean(diag H) I that are 0 where `kept` is False.

        for each row w with survivors S:     v_S = w_S + [H_SS]^-1 H_SZ w_Z,      Z the pruned entries

    Args:
        problem: the layer.
        kept: bool of the weight's shape.
        damping: fraction of the mean of the diagonal.
    """
    hessian, weight = problem.damped(damping), problem.weight
    found = torch.zeros_like(weight)
    for row, mask in enumerate(kept):
        if bool(mask.any()):
            part = hessian[mask]
            change = part[:, ~mask] @ weight[row, ~mask]
            found[row, mask] = weight[row, mask] + torch.linalg.solve(part[:, mask], change)
    return found
