"""ALPS: masks and weights of one layer by the alternating direction method of multipliers."""

from __future__ import annotations

import torch
from torch import Tensor

from pruning.reconstruction.layer_problem import LayerProblem, Solution, lowest, lowest_of_windows

PENALTY = 0.1
"""First penalty, for a diagonal of ones."""
CHECKED = 3
"""Rounds between two changes of the penalty."""
GROWTHS = ((0.1, 1.3), (0.005, 1.2))
"""Pairs: change of the support, as a fraction of the kept entries, and the growth of the penalty above it."""
SLOW = 1.1
"""Factor for smaller changes."""
SETTLED = (30, 0.0003)
"""Rounds after which a change of the support below this fraction ends the search."""


def alps(problem: LayerProblem, *, damping: float = 0.01, rounds: int = 300, refits: int = 10) -> Solution:
    """Prune a layer by ALPS: weights W and their sparse copy D approach each other while the penalty r grows.

        W <- (Hc + r I)^-1 (Hc W0 - V + r D),     D <- the largest entries of W + V / r,     V <- V + r (W - D)

    with Hc = H + damping mean(diag H) I, scaled to a diagonal of ones. Every three rounds r grows by 1.3, 1.2 or 1.1,
    faster while the support of D changes more; while it hardly changes at the beginning, r is divided by 5 and the
    search begins anew. It ends when the support stays. Then least squares on the support, by `refits` steps of
    conjugate gradients.

    Args:
        problem: the layer.
        damping: fraction of the mean of the diagonal, above 0.
        rounds: largest number of rounds.
        refits: steps of conjugate gradients.

    Source: Meng et al. 2024, arXiv 2406.07831.
    """
    damped = problem.damped(damping)
    scale = damped.diagonal().sqrt()
    hessian = damped / scale / scale[:, None]
    unused = problem.hessian.diagonal() == 0
    first = (problem.weight * scale).masked_fill(unused, 0)  # unused inputs go first
    is_diagonal = not bool(hessian.triu(1).any())  # without correlations the largest weights are the solution
    dense = first if is_diagonal else _approached(_Splitting(problem, hessian, first), rounds)
    kept = _support(dense, problem)
    found = refit_by_gradients(dense * kept, first, hessian, kept, refits) / scale
    return Solution(torch.where(unused & kept, problem.weight, found), kept)


class _Splitting:
    """The two copies of the weights and their multipliers, which approach each other."""

    def __init__(self, problem: LayerProblem, hessian: Tensor, first: Tensor) -> None:
        self._problem, self._first, self._product = problem, first, first @ hessian
        self._values, self._vectors = torch.linalg.eigh(hessian)
        self.penalty = PENALTY
        self.begin()

    def begin(self) -> None:
        """Begin with the weights, and their largest entries."""
        self.dense, self.dual = self._first, torch.zeros_like(self._first)
        self.kept = _support(self._first, self._problem)
        self._sparse = self._first * self.kept

    def step(self) -> None:
        """Move both copies and the multipliers once."""
        goal = self._product - self.dual + self.penalty * self._sparse
        self.dense = goal @ self._vectors / (self._values + self.penalty) @ self._vectors.mT
        raised = self.dense + self.dual / self.penalty
        self.kept = _support(raised, self._problem)
        self._sparse = raised * self.kept
        self.dual = self.dual + self.penalty * (self.dense - self._sparse)


def _approached(both: _Splitting, rounds: int) -> Tensor:
    """Return the dense copy once the support of the sparse one stays."""
    seen, has_grown = both.kept, False
    for step in range(1, rounds + 1):
        both.step()
        if step % CHECKED:
            continue
        changed = float(torch.count_nonzero(both.kept ^ seen)) / max(1, int(torch.count_nonzero(seen)))
        growth = next((growth for least, growth in GROWTHS if changed > least), None)
        if growth is not None or (changed and has_grown):
            both.penalty *= growth or SLOW
            has_grown = True
        elif has_grown:
            break
        else:
            both.penalty /= 5
            if changed:
                both.begin()
        seen = both.kept
        if step > SETTLED[0] and changed < SETTLED[1]:
            break
    return both.dense


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
