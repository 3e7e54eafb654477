"""Problem of pruning one layer: weights, statistics of inputs, entries left, how many must go; masks by its scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pruning.selection.smallest import best_of_pools, prune_smallest_


@dataclass(frozen=True)
class Target:
    """Number of entries that a layer loses: a fraction of all, or all but `n` of each `m` consecutive inputs.

    Args:
        sparsity: fraction of the entries that is 0 in the end; its count is rounded.
        n, m: windows along the input dimension; None prunes to `sparsity`.
        by_row: fraction of each row, for methods that rank rows; None: `sparsity`.
    """

    sparsity: float = 0.0
    n: int | None = None
    m: int | None = None
    by_row: float | None = None

    def count(self, entries: int) -> int:
        """Return how many of a number of entries are 0 in the end."""
        return round(self.sparsity * entries)


@dataclass(frozen=True)
class LayerProblem:
    """One group of a layer: choose which entries go, and the values of the others, so that outputs change least.

        error(V) = tr((V - W) H (V - W)^T) = mean over inputs x of 2 |(V - W) x|^2,      H = 2 / N X^T X

    Args:
        weight: W, (outputs, inputs), float32 or float64.
        hessian: H, (inputs, inputs), of the same dtype and device.
        kept: bool of the shape of W, False for entries that were pruned before; their weights are 0.
        target: how many entries are 0 in the end.
    """

    weight: Tensor
    hessian: Tensor
    kept: Tensor
    target: Target

    def error(self, weight: Tensor) -> float:
        """Return the error of other weights."""
        change = (weight - self.weight).double()
        return float(((change @ self.hessian.double()) * change).sum())

    @property
    def size(self) -> float:
        """Error of weights that are all 0."""
        return self.error(torch.zeros_like(self.weight))

    def damped(self, damping: float) -> Tensor:
        """Return H + damping mean(diag H) I; the identity for a layer without inputs."""
        level = damping * self.hessian.diagonal().mean()
        found = self.hessian.clone()
        found.diagonal().add_(level if bool(level > 0) else 1.0)
        return found


@dataclass(frozen=True)
class Solution:
    """Weights of a pruned layer, (outputs, inputs), 0 where `kept` is False."""

    weight: Tensor
    kept: Tensor


def lowest(scores: Tensor, kept: Tensor, count: int) -> Tensor:
    """Return a mask without the `count` entries of lowest score; ties: lowest index first.

    Args:
        scores: of any shape.
        kept: bool of that shape.
        count: number of entries that the mask prunes. Entries pruned before count, and always stay pruned.
    """
    pruned = kept.numel() - int(torch.count_nonzero(kept))
    return prune_smallest_(kept.clone(), scores, max(0, count - pruned))


def lowest_of_rows(scores: Tensor, kept: Tensor, count: int) -> Tensor:
    """Return a mask in which each row of (rows, columns) loses its `count` entries of lowest score; see `lowest`."""
    order = scores.masked_fill(~kept, -torch.inf).argsort(dim=1, stable=True)
    found = torch.ones_like(kept).scatter_(1, order[:, :count], False)
    return found & kept


def lowest_of_windows(scores: Tensor, kept: Tensor, n: int, m: int) -> Tensor:
    """Return a mask in which each window of `m` columns keeps its `n` entries of highest score."""
    split = (-1, m)
    return best_of_pools(scores.reshape(split), kept.reshape(split), n).view(scores.shape)


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
