"""Allocation of a sparsity to layers from measured losses, by dynamic programming.

    minimise sum_l f_l(p_l) subject to sum_l p_l = round(s sum_l n_l), p_l pruned entries of layer l

where f_l is the loss with layer l alone pruned, measured at some sparsities and linear between them. Two layers between
measured sparsities can trade entries without a larger sum until one of them is at a measured sparsity, so a best
allocation has at most one layer between two of them. Each layer in turn is that layer; a table over totals combines the
measured sparsities of the others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from pruning.refused import RefusedValue
from pruning.selection.allocation import largest_remainder

TOTALS = 4096
"""Maximum number of totals in a table; larger totals are grouped, and the best allocation of a group is kept."""

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class _Curve:
    """Measured counts of pruned entries of a layer, ascending from 0, and their losses."""

    counts: Array
    losses: Array

    def at(self, pruned: Array | int) -> Array:
        return np.asarray(np.interp(pruned, self.counts, self.losses))


@dataclass(frozen=True)
class _Table:
    """Best allocations of the first layers: one row for each group of totals, linked to a row of the table before."""

    totals: Array
    losses: Array
    name: str = ""
    added: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    """Entries that the layer `name` adds to each total."""
    before: _Table | None = None
    index: Array = field(default_factory=lambda: np.zeros(1, np.int64))
    """Row of `before` to which each total adds the layer `name`."""

    def plus(self, name: str, curve: _Curve, most: int, group: int) -> _Table:
        """Return the table that also allocates one of its measured counts to the layer `name`."""
        places = np.repeat(np.arange(len(self.totals)), len(curve.counts))
        added = np.tile(curve.counts, len(self.totals))
        totals = self.totals[places] + added
        losses = self.losses[places] + np.tile(curve.losses, len(self.totals))
        fits = totals <= most
        places, added, totals, losses = places[fits], added[fits], totals[fits], losses[fits]
        order = np.lexsort((losses, totals // group))
        _, first = np.unique(totals[order] // group, return_index=True)
        best = order[first]
        return _Table(totals[best], losses[best], name, added[best], self, places[best])

    def traced(self, row: int) -> dict[str, int]:
        """Return layer -> number of entries that the allocation in a row prunes."""
        found: dict[str, int] = {}
        table: _Table | None = self
        while table is not None and table.before is not None:
            found[table.name], row, table = int(table.added[row]), int(table.index[row]), table.before
        return found


def least_loss(
    sizes: Mapping[str, int], curves: Mapping[str, Mapping[float, float]], sparsity: float
) -> dict[str, int]:
    """Return name -> number of entries to prune, with the least sum of losses at exactly the total.

    Totals above `TOTALS` entries are grouped, so the sum may then be slightly above the least; it is never above the
    sum of the uniform allocation.

    Args:
        sizes: number n_l of entries of each layer.
        curves: name -> sparsity in [0, 1] -> loss with this layer alone pruned; 0 is the dense network.
        sparsity: fraction s of all entries to prune.

    Raises:
        ValueError: a layer has no curve or no loss at sparsity 0, a loss is not finite, or the layers at their largest
            measured sparsities prune less than `sparsity`.
    """
    if not 0 <= sparsity < 1:
        raise RefusedValue("sparsity", sparsity).because(
            "must lie in [0, 1): the fraction of all entries that is pruned."
        )
    lines = {name: _measured(name, size, curves.get(name, {})) for name, size in sizes.items()}
    if unknown := next((name for name in curves if name not in sizes), None):
        raise ValueError(f"`curves` (with {unknown!r}) must be of the layers in `sizes`; leave it out.")
    total, most = round(sparsity * sum(sizes.values())), sum(int(line.counts[-1]) for line in lines.values())
    if total > most:
        raise RefusedValue("sparsity", sparsity).because(
            "lies outside of the measured sparsities: all layers at their largest ones prune "
            f"{most / sum(sizes.values()):.6g}; measure larger sparsities, or ask for less."
        )
    best = _Best(lines, total, max(1, math.ceil(total / TOTALS)))
    best.search([*lines], _Table(np.zeros(1, np.int64), np.zeros(1)))
    best.consider_uniform(sizes, sparsity)
    return {name: best.counts[name] for name in sizes}


def _measured(name: str, size: int, curve: Mapping[float, float]) -> _Curve:
    if 0 not in curve or not all(0 <= sparsity <= 1 and math.isfinite(loss) for sparsity, loss in curve.items()):
        raise ValueError(
            f"`curves` must give {name!r} finite losses at sparsities in [0, 1], 0 (dense) among them; measure the "
            "layer, or leave it out of `sizes`."
        )
    points = {round(sparsity * size): curve[sparsity] for sparsity in sorted(curve)}
    return _Curve(np.array([*points], np.int64), np.array([*points.values()], np.float64))


class _Best:
    """Best allocation so far, and the search for a better one."""

    def __init__(self, curves: Mapping[str, _Curve], total: int, group: int) -> None:
        self.counts: dict[str, int] = {}
        self._loss = math.inf
        self._curves, self._total, self._group = curves, total, group

    def search(self, between: Sequence[str], table: _Table) -> None:
        """Let each of the layers `between` lie between measured sparsities, with all others in the table.

        The layers are halved: each half is added to the table of the other, so that L layers take L log L additions.
        """
        if len(between) == 1:
            self._complete(between[0], table)
            return
        half = len(between) // 2
        for free, fixed in ((between[:half], between[half:]), (between[half:], between[:half])):
            with_fixed = table
            for name in fixed:
                with_fixed = with_fixed.plus(name, self._curves[name], self._total, self._group)
            self.search(free, with_fixed)

    def _complete(self, name: str, table: _Table) -> None:
        """Give the rest of the total to a layer."""
        curve, rest = self._curves[name], self._total - table.totals
        losses = np.where(rest <= curve.counts[-1], table.losses + curve.at(rest), np.inf)
        place = int(losses.argmin())
        if losses[place] < self._loss:
            self._loss, self.counts = float(losses[place]), {**table.traced(place), name: int(rest[place])}

    def consider_uniform(self, sizes: Mapping[str, int], sparsity: float) -> None:
        """Take the uniform allocation if it is measured and better."""
        most = {name: int(curve.counts[-1]) for name, curve in self._curves.items()}
        quotas = {name: sparsity * size for name, size in sizes.items()}
        uniform = largest_remainder(quotas, self._total, dict.fromkeys(sizes, 0), most)
        loss = math.fsum(float(self._curves[name].at(count)) for name, count in uniform.items())
        if loss < self._loss:
            self._loss, self.counts = loss, uniform


def interpolated(curve: Mapping[float, float], sparsity: float) -> float:
    """Return the loss at a sparsity, linear between the measured ones."""
    levels = sorted(curve)
    return float(np.interp(sparsity, levels, [curve[level] for level in levels]))
