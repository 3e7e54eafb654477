"""Problem of pruning one layer with the statistics of its inputs, X^T X, and the methods that solve it.

The methods here are magnitude, Wanda, least squares on given survivors, and ALPS, which finds masks and weights by the
alternating direction method of multipliers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.nn.modules.conv import _ConvNd

from pruning.holding.parameter import hooked
from pruning.layouts import multiplies
from pruning.repair.corrections import laid_out
from pruning.selection.allocation import kept_of_rows
from pruning.selection.smallest import best_of_pools, prune_smallest_


@dataclass(frozen=True)
class Target:
    """Number of units that a layer loses: a fraction of all, or all but `n` of each `m` consecutive inputs.

    Args:
        sparsity: fraction of the units that is 0 in the end; its count is rounded.
        n, m: windows along the input dimension; None prunes to `sparsity`.
        by_row: number of units that each row loses, for methods that rank rows; None: by `sparsity`.
        size, outputs: numbers of consecutive columns and rows that are one unit.
    """

    sparsity: float = 0.0
    n: int | None = None
    m: int | None = None
    by_row: int | Tensor | None = None
    size: int = 1
    outputs: int = 1

    @property
    def entries(self) -> int:
        """Number of entries of a unit."""
        return self.size * self.outputs

    def count(self, units: int) -> int:
        """Return how many of a number of units are 0 in the end."""
        return round(self.sparsity * units)


@dataclass(frozen=True)
class LayerProblem:
    """One group of a layer: choose which entries go, and the values of the others, so that outputs change least.

        error(V) = tr((V - W) H (V - W)^T) = mean over inputs x of 2 |(V - W) x|^2,      H = 2 / N X^T X

    Args:
        weight: W, (outputs, inputs), float32 or float64. For windows and blocks, the inputs of one kernel position
            follow those of another, and inputs with weights of 0, independent of all others, fill up the last block.
        hessian: H, (inputs, inputs), of the same dtype and device.
        kept: bool of the shape of W, False for entries that were pruned before; their weights are 0.
        target: how many units are 0 in the end.
    """

    weight: Tensor
    hessian: Tensor
    kept: Tensor
    target: Target

    @property
    def alive(self) -> Tensor:
        """Bool of (rows, units): whether any entry of a unit was kept before; a row has `target.outputs` outputs."""
        return self._cut(self.kept).any(2)

    def by_unit(self, scores: Tensor) -> Tensor:
        """Return the sum of the scores of each unit, (rows, units)."""
        return self._cut(scores).sum(2)

    def by_entry(self, units: Tensor) -> Tensor:
        """Return the mask of the entries that were kept before, and whose units are kept."""
        return self.spread(units) & self.kept

    def spread(self, units: Tensor) -> Tensor:
        """Return the value of the unit of each entry, (outputs, inputs of the units)."""
        size, outputs = self.target.size, self.target.outputs
        return units.repeat_interleave(size, 1).repeat_interleave(outputs, 0)[: len(self.kept)]

    def _cut(self, entries: Tensor) -> Tensor:
        """Return the entries of each unit, (rows, units, entries); zeros fill up the last row."""
        size, outputs = self.target.size, self.target.outputs
        filled = pad(entries, (0, 0, 0, -len(entries) % outputs))
        return filled.reshape(len(filled) // outputs, outputs, -1, size).transpose(1, 2).flatten(2)

    def error(self, weight: Tensor) -> float:
        """Return the error of other weights."""
        change = (weight - self.weight).double()
        return float((change @ self.hessian.double()).mul_(change).sum())

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


def lowest_of_rows(scores: Tensor, kept: Tensor, count: int | Tensor) -> Tensor:
    """Return a mask in which each row of (rows, columns) loses its `count` entries of lowest score; see `lowest`."""
    order = scores.masked_fill(~kept, -torch.inf).argsort(dim=1, stable=True)
    if isinstance(count, int):
        return torch.ones_like(kept).scatter_(1, order[:, :count], False) & kept
    places = torch.arange(kept.shape[1], device=kept.device)
    return torch.ones_like(kept).scatter_(1, order, places >= count.to(kept.device)[:, None]) & kept


def lowest_of_windows(scores: Tensor, kept: Tensor, n: int, m: int) -> Tensor:
    """Return a mask in which each window of `m` columns keeps its `n` entries of highest score."""
    split = (-1, m)
    return best_of_pools(scores.reshape(split), kept.reshape(split), n).view(scores.shape)


def wanda(problem: LayerProblem) -> Solution:
    """Prune each row's entries of lowest |w_j| sqrt(H_jj), without changes of the others: Wanda.

    Each row loses floor(sparsity inputs) entries; of short rows the first lose one more, so that the layer has its
    sparsity (`pruning.selection.allocation.kept_of_rows`). For windows, each keeps n of m; blocks have the sums, and
    those of the same outputs are a row.

    Source: Sun et al. 2023, arXiv 2306.11695.
    """
    scores = problem.weight.abs() * problem.hessian.diagonal().sqrt()
    target = problem.target
    if target.m is not None and target.n is not None:
        kept = lowest_of_windows(scores, problem.kept, target.n, target.m)
    else:
        scores = problem.by_unit(scores)
        rows, units = scores.shape
        count = units - kept_of_rows(target.sparsity, rows, units) if target.by_row is None else target.by_row
        kept = problem.by_entry(lowest_of_rows(scores, problem.alive, count))
    return Solution(problem.weight.masked_fill(~kept, 0), kept)


def magnitude(problem: LayerProblem) -> Solution:
    """Prune the layer's smallest |w|, or sums of a block; for windows, each keeps its n largest of m."""
    kept = _support(problem.weight.abs(), problem)
    return Solution(problem.weight.masked_fill(~kept, 0), kept)


def rows_of_inputs(module: nn.Module, inputs: Tensor, counts: Tensor | None) -> Tensor:
    """Return the vectors that multiply the rows of a layer's weight: (groups, vectors, inputs of a group).

    Args:
        module: the layer.
        inputs: its input; the patches of a convolution's input are its vectors.
        counts: bool of (examples, positions), False where a position is padding; None: all count. It applies to inputs
            of the shape (examples, positions, ...), and (examples * positions, inputs).
    """
    if isinstance(module, _ConvNd):
        return laid_out(module, inputs if inputs.ndim == len(module.kernel_size) + 2 else inputs[None])
    if counts is not None and inputs.ndim > 2 and inputs.shape[:2] == counts.shape:
        inputs = inputs[counts]
    elif counts is not None and inputs.ndim == 2 and len(inputs) == counts.numel():
        inputs = inputs[counts.flatten()]
    return laid_out(module, inputs if inputs.ndim > 1 else inputs[None])


@dataclass
class InputStatistics:
    """X^T X of a layer's inputs, for each group of the layer.

    Args:
        dtype: dtype of the sums.
        product: (groups, inputs, inputs); None before the first input.
        rows: number of rows of X.
        padded: rows of padding count, because the order of the rows is unknown.
    """

    dtype: torch.dtype
    product: Tensor | None = None
    rows: int = 0
    padded: bool = False

    def add(self, product: Tensor, rows: int) -> None:
        """Add X^T X of further rows."""
        self.product = product.clone() if self.product is None else self.product.add_(product)
        self.rows += rows

    def hessian(self, width: int, groups: int, device: torch.device) -> Tensor:
        """Return 2 / N X^T X, (groups, inputs, inputs).

        It is the identity, by which all methods rank by magnitude, for a group whose inputs are always 0, and if there
        was no input.
        """
        identity = torch.eye(width, dtype=self.dtype, device=device)
        if self.product is None or not self.rows:
            return identity.expand(groups, -1, -1)
        found = self.product * (2 / self.rows)
        unused = (found.diagonal(dim1=1, dim2=2) == 0).all(dim=1)
        found[unused] = identity
        return found


@dataclass
class Collector:
    """Statistics of the layers of one part of a network, while batches run through it.

    Args:
        layers: name of a weight -> its layer.
        dtype: dtype of the sums.
        counts: bool of (examples, positions), False where a position of the batch is padding; None: all count.
        found: name of a weight -> the statistics of its inputs.
        in_lists: weights of layers that may get vectors in any order: all (vectors, inputs) of these layers count.
    """

    layers: Mapping[str, nn.Module]
    dtype: torch.dtype
    counts: Tensor | None = None
    found: dict[str, InputStatistics] = field(init=False)
    in_lists: Collection[str] = ()
    _products: list[tuple[SeenTensor, bool, Tensor, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found = {name: InputStatistics(self.dtype) for name in self.layers}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Read the inputs of the layers in one forward pass inside the context."""
        handles = (
            module.register_forward_pre_hook(partial(self._read, name), with_kwargs=True)
            for name, module in self.layers.items()
        )
        with hooked(handles):
            yield
        self._products.clear()

    def _read(self, name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        inputs = next((each for each in (*given, *named.values()) if isinstance(each, Tensor)), None)
        if inputs is not None and multiplies(module, inputs):
            in_any_order = name in self.in_lists and inputs.ndim == 2 and not isinstance(module, _ConvNd)
            product, rows = self._product(module, inputs.detach(), None if in_any_order else self.counts)
            own = self.found[name]
            own.add(product, rows)
            own.padded |= in_any_order and self.counts is not None

    def _product(self, module: nn.Module, inputs: Tensor, counts: Tensor | None) -> tuple[Tensor, int]:
        """Return X^T X and the number of rows of X; linear layers that get one tensor share one product."""
        is_shared = not isinstance(module, _ConvNd)
        for seen, counted, product, rows in self._products if is_shared else ():
            if counted == (counts is not None) and seen.is_still(inputs):
                return product, rows
        vectors = rows_of_inputs(module, inputs, counts)
        product, rows = product_of(vectors, self.dtype), vectors.shape[1]
        if is_shared:
            self._products.append((SeenTensor(inputs), counts is not None, product, rows))
        return product, rows


def product_of(vectors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return X^T X in a dtype."""
    with torch.autocast(vectors.device.type, enabled=False):
        vectors = vectors.to(dtype)
        return vectors.mT @ vectors


class SeenTensor:
    """Tensor that is known again while its values stay; it is kept alive, so that no other one gets its address."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version = tensor, self._version_of(tensor)

    def is_still(self, other: Tensor) -> bool:
        """Return whether another tensor has the same memory, with the values of then."""
        own = self._tensor
        same = own.data_ptr() == other.data_ptr() and own.stride() == other.stride() and own.shape == other.shape
        return same and own.dtype == other.dtype and self._version == self._version_of(other) >= 0

    @staticmethod
    def _version_of(tensor: Tensor) -> int:
        return -1 if tensor.is_inference() else tensor._version


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
    kept = _nearest(dense, problem)
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
        self.kept = _nearest(self._first, self._problem)
        self._sparse = self._first * self.kept

    def step(self) -> None:
        """Move both copies and the multipliers once."""
        goal = self._product - self.dual + self.penalty * self._sparse
        self.dense = goal @ self._vectors / (self._values + self.penalty) @ self._vectors.mT
        raised = self.dense + self.dual / self.penalty
        self.kept = _nearest(raised, self._problem)
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
        if not float(norm) > torch.finfo(norm.dtype).tiny:  # below, the length of a step may be 0 / 0
            break
        moved = (direction @ hessian).masked_fill(~kept, 0)
        length = norm / (direction * moved).sum()
        found += length * direction
        residual -= length * moved
        before, norm = norm, residual.square().sum()
        direction = residual + norm / before * direction
    return found


def _nearest(weight: Tensor, problem: LayerProblem) -> Tensor:
    """Return the support of the nearest pruned weights: the largest |w|, or blocks with the largest sums of squares."""
    return _support(weight.abs() if problem.target.entries == 1 else weight.square(), problem)


def _support(scores: Tensor, problem: LayerProblem) -> Tensor:
    alive, target = problem.alive, problem.target
    if target.m is not None and target.n is not None:
        return lowest_of_windows(scores, problem.kept, target.n, target.m)
    return problem.by_entry(lowest(problem.by_unit(scores), alive, target.count(alive.numel())))
