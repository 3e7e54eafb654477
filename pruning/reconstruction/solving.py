"""Pruning of one layer, matrix by matrix; its new weight waits until the statistics of its block are complete."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pruning.layouts import WeightLayout
from pruning.reconstruction.layer_problem import InputStatistics, LayerProblem, Solution, Target
from pruning.selection.allocation import kept_of_rows

Solve = Callable[[LayerProblem], Solution]
Found = InputStatistics | Mapping[int, InputStatistics]
"""Statistics of a layer, or expert -> those of its matrix in a stack."""


@dataclass(frozen=True)
class LayerReport:
    """Pruning of one layer.

    Args:
        block: name of the block.
        sparsity: fraction of the layer's entries that is 0.
        error: mean squared change of the outputs on calibration data, as a fraction of the outputs' mean square; NaN if
            no example reached the layer, or if the inputs of a layer pruned by magnitude are no numbers.
        rows: number of input vectors that the statistics have; 0 if no example reached the layer.
        seconds: time for choosing the mask and the weights.
        tokens: number of input vectors of each expert; experts without any were pruned by magnitude. Empty for layers
            that are no stacks of experts.
        padded: padding counts among the vectors, because their order was unknown.
    """

    block: str
    sparsity: float
    error: float
    rows: int
    seconds: float
    tokens: Sequence[int] = ()
    padded: bool = False


class Solving:
    """New weight and mask of a layer.

    Args:
        solve: the method.
        layout: layout of the weight.
        before: bool of the weight's shape, False for entries that were pruned before.
        target: how many entries are 0 in the end.
        reads_data: the method reads the statistics.
    """

    def __init__(
        self, solve: Solve, layout: WeightLayout, before: Tensor, target: Target, reads_data: bool = True
    ) -> None:
        self._solve, self._layout, self._before, self._reads_data = solve, layout, before, reads_data
        self._columns = _columns(layout, before.shape, target) if target.m or target.entries > 1 else None
        matrices, outputs, width = layout.rows(before).shape
        width = width if self._columns is None else len(self._columns) // target.size
        self._targets = _targets(target, (matrices, -(-outputs // target.outputs), width))
        self._weight, self._kept = torch.empty(0), torch.empty(0)
        self._errors = self._sizes = self._seconds = 0.0
        self._rows: dict[int, int] = {}
        self._is_stack = self._padded = False

    def solve(self, parameter: nn.Parameter, found: Found, dtype: torch.dtype) -> None:
        """Solve the matrices whose statistics are given; the parameter stays as it is.

        Raises:
            ValueError: the statistics or the new weights are no numbers, or the method says why it fails.
        """
        begun = time.perf_counter()
        weights, before = self._layout.rows(parameter.detach()), self._layout.rows(self._before)
        if not self._rows:
            self._weight, self._kept = torch.empty_like(weights), torch.empty_like(weights, dtype=torch.bool)
        self._is_stack = not isinstance(found, InputStatistics)
        self._padded |= any(each.padded for each in ([found] if isinstance(found, InputStatistics) else found.values()))
        for index, hessian, rows in _hessians(found, weights.shape, weights.device):
            if self._reads_data and not bool(hessian.isfinite().all()):
                raise ValueError("the statistics of its inputs are infinite or NaN; check the data and the network.")
            weight = weights[index].to(dtype, copy=True)
            kept = before[index].to(weights.device, copy=True, memory_format=torch.contiguous_format)
            problem = LayerProblem(weight, hessian, kept, self._targets[index])
            solved = _solution(self._solve, problem, self._columns)
            if not bool(solved.weight.isfinite().all()):
                raise ValueError("its new weights are infinite or NaN.")
            self._weight[index], self._kept[index] = solved.weight, solved.kept
            share = rows if self._is_stack else 1  # outputs of an expert count as often as it is called
            self._errors += share * problem.error(solved.weight)
            self._sizes += share * problem.size
            self._rows[index] = rows
        self._seconds += time.perf_counter() - begun

    def write(self, parameter: nn.Parameter, block: str) -> tuple[Tensor, LayerReport]:
        """Give the parameter its new values; return its mask and its report."""
        begun = time.perf_counter()
        mask = self._layout.parameter(self._kept, parameter.shape)
        parameter.copy_(self._layout.parameter(self._weight, parameter.shape))
        tokens = [self._rows[index] for index in sorted(self._rows)] if self._is_stack else []
        rows = sum(tokens) if tokens else self._rows[0]
        left = float(torch.count_nonzero(mask)) / mask.numel()
        error = self._errors / self._sizes if self._sizes and rows else math.nan
        seconds = self._seconds + time.perf_counter() - begun
        return mask, LayerReport(block, 1 - left, error, rows, seconds, tokens, self._padded)


def _hessians(found: Found, shape: Sequence[int], device: torch.device) -> Iterator[tuple[int, Tensor, int]]:
    """Yield (index of a matrix, its H, number of its input vectors)."""
    matrices, _, width = shape
    if isinstance(found, InputStatistics):
        for index, hessian in enumerate(found.hessian(width, matrices, device)):
            yield index, hessian, found.rows
        return
    for index, own in found.items():
        yield index, own.hessian(width, 1, device)[0], own.rows


def _targets(target: Target, shape: Sequence[int]) -> list[Target]:
    """Return the target of each matrix of a layer; they round cumulatively, so that the layer's total is exact.

    Args:
        target: target of the layer.
        shape: number of matrices, of rows of each, and of units of a row.
    """
    matrices, outputs, width = shape
    if target.m is not None:
        return [target] * matrices
    found, before, size = [], 0, outputs * width
    lost = width - kept_of_rows(target.sparsity, matrices * outputs, width)
    for index in range(matrices):
        until = target.count((index + 1) * size)
        by_row = lost if isinstance(lost, int) else lost[index * outputs : (index + 1) * outputs]
        found.append(replace(target, sparsity=(until - before) / size, by_row=by_row))
        before = until
    return found


def _columns(layout: WeightLayout, shape: Sequence[int], target: Target) -> Tensor:
    """Return the columns of a row with the inputs of one position together; -1 fills up a position's last block."""
    inputs = layout.unfolded(shape)[layout.by_position[-1]]
    places = torch.arange(layout.row_entries(shape)).view(inputs, -1).T
    return pad(places, (0, -inputs % target.size), value=-1).flatten()


def _reordered(problem: LayerProblem, columns: Tensor) -> LayerProblem:
    """Return a problem with other columns; those of index -1 are independent of all others, with weights of 0."""
    added, mean = columns < 0, problem.hessian.diagonal().mean()
    hessian = pad(problem.hessian, (0, 1, 0, 1))[columns][:, columns]
    hessian.diagonal()[added] = mean  # damping, a fraction of the mean, stays
    weight, kept = (pad(each, (0, 1))[:, columns] for each in (problem.weight, problem.kept))
    return replace(problem, weight=weight, hessian=hessian, kept=kept)


def _solution(solve: Solve, problem: LayerProblem, columns: Tensor | None = None) -> Solution:
    """Return the solution of a method, with weights that are 0 where its mask is; `columns` are those that it sees."""
    if columns is not None:
        columns = columns.to(problem.weight.device)
        found = _solution(solve, _reordered(problem, columns))
        order = columns.argsort()[int((columns < 0).sum()) :]
        return Solution(found.weight[:, order], found.kept[:, order])
    found = solve(problem)
    shape = problem.weight.shape
    if not isinstance(found, Solution) or not found.weight.shape == found.kept.shape == shape:
        raise ValueError(
            f"`method` (which returned a {type(found).__name__}) must return a Solution of {tuple(shape)}."
        )
    kept = found.kept.bool() & problem.kept
    left = replace(problem, kept=kept)
    if not torch.equal(problem.by_entry(left.alive), left.kept):
        raise ValueError(
            f"`method` must keep or prune blocks of {problem.target.size} inputs and {problem.target.outputs} outputs "
            "whole: the `size` and `outputs` of its target."
        )
    return Solution(found.weight.masked_fill(~kept, 0), kept)
