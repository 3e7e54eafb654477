"""Candidates with their objectives at a rung of `frontier`, and the sentences of its answer.

Point p dominates point q if p is at most q in every objective and below q in one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import le, methodcaller
from typing import NamedTuple

from orchestrator.compare.statistics import Estimate, estimate, has_spread, ratio
from orchestrator.core.metrics import Metric
from orchestrator.planning.number_formats import counted, kilobytes, milliseconds, significant, whole_number
from orchestrator.sweep.search.candidates import Candidate, Cell
from orchestrator.sweep.search.policy import Answer, Seen, in_words, unit_of
from orchestrator.sweep.search.quantities import DEPLOYED, MEASURED

Objectives = tuple[float, ...]
"""Values of a network, all to be made small."""


def dominates(one: Objectives, other: Objectives) -> bool:
    """Whether `one` is at most `other` in every objective, and below `other` in one."""
    return one != other and all(map(le, one, other))


def nondominated(points: Sequence[Objectives]) -> list[int]:
    """Return the indices of the points that no other point dominates, in order; equal points stay together.

    In lexicographic order a point can only be dominated by a point before it, and then by a non-dominated one.
    """
    found: list[int] = []
    front: list[Objectives] = []
    stairs = _Stairs()
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if not front or point != front[-1]:
            if len(point) > 3:
                behind = any(dominates(each, point) for each in front)
            else:
                behind = not stairs.add(*_last_two(point))
            if behind:
                continue
            front.append(point)
        found.append(index)
    return sorted(found)


def hypervolume(points: Sequence[Objectives], reference: Objectives) -> float:
    """Return the volume that the points dominate below a reference point, exactly.

    For points P and reference r it is the volume of the union of the boxes [p, r], for p in P with p < r in every
    objective. Up to three objectives are summed in slices. With more, each point adds the part of its own box that the
    boxes of later points leave:

        volume(p_1, ..., p_n) = sum_i (box(p_i) - volume(max(p_i, p_{i+1}), ..., max(p_i, p_n)))

    Args:
        points: points; those beyond the reference count for nothing
        reference: upper end of every objective

    Reference: While, Bradstreet and Barone 2012, IEEE Transactions on Evolutionary Computation 16(1) (WFG).
    """
    inside = [point for point in points if all(a < b for a, b in zip(point, reference, strict=True))]
    front = sorted({inside[index] for index in nondominated(inside)})
    if len(reference) <= 3:
        return _slices(front, reference)
    return math.fsum(_added(point, front[place:], reference) for place, point in enumerate(front, start=1))


class _Stairs:
    """Non-dominated points with two objectives, in order of the first."""

    def __init__(self) -> None:
        self.firsts: list[float] = []
        self.seconds: list[float] = []

    def add(self, first: float, second: float) -> bool:
        """Add a point, and drop the points that it dominates; return whether no point is at most it in both."""
        place = bisect_right(self.firsts, first)
        if place and self.seconds[place - 1] <= second:
            return False
        begin = bisect_left(self.firsts, first)
        end = begin
        while end < len(self.seconds) and self.seconds[end] >= second:
            end += 1
        self.firsts[begin:end], self.seconds[begin:end] = [first], [second]
        return True

    def area(self, first: float, second: float) -> float:
        """Return the area that the points dominate below a reference point."""
        tops = [second, *self.seconds]
        return math.fsum(
            (first - low) * (top - bottom) for low, top, bottom in zip(self.firsts, tops, self.seconds, strict=False)
        )


def _last_two(point: Objectives) -> Objectives:
    """Return the second and third objective; zero for one that the point lacks."""
    return (*point[1:], 0.0, 0.0)[:2]


def _slices(front: Sequence[Objectives], reference: Objectives) -> float:
    """Sum the slices between sorted non-dominated points with up to three objectives."""
    stairs, parts = _Stairs(), list[float]()
    ends = (*reference[1:], 1.0, 1.0)[:2]
    for point, after in zip(front, [*front[1:], reference], strict=False):
        stairs.add(*_last_two(point))
        parts.append((after[0] - point[0]) * stairs.area(*ends))
    return math.fsum(parts)


def _added(point: Objectives, others: Sequence[Objectives], reference: Objectives) -> float:
    """Return the volume of a point's box outside of the boxes of other points."""
    shared = [tuple(map(max, point, other)) for other in others]
    box = math.prod(b - a for a, b in zip(point, reference, strict=True))
    return box - hypervolume(shared, reference)


WRITTEN: Mapping[str, tuple[Callable[[float], str], str]] = {
    "parameters": (whole_number, "parameters"),
    "active_parameters": (whole_number, "parameters of a token"),
    "macs": (whole_number, "multiply-accumulates"),
    "bytes": (kilobytes, "kB"),
    "latency": (milliseconds, "ms"),
    "token_latency": (milliseconds, "ms a token"),
    "training_macs": (lambda value: significant(value, 3), "multiply-accumulates of training"),
}
"""Quantity -> its value for people, and the unit."""
TIMES = ("latency", "token_latency")
"""Quantities whose means are geometric, as in the comparison."""
ROUNDING = 1e-9
"""Rounding errors that a constraint allows for."""


_NONE = frozenset[str]()


class Placed(NamedTuple):
    """Candidate with its figures at a rung."""

    candidate: Candidate
    networks: tuple[Cell, ...]
    metric: Metric
    values: Sequence[float]
    """Primary metric on validation by seed; in the deployed format if it changes outputs and is measured."""
    dense: Sequence[float]
    """The same of the dense networks."""
    quantities: Mapping[str, Sequence[float]]
    """Quantity -> its values by seed."""
    objectives: Objectives
    """Mean loss of the primary metric, and the means of the quantities to make small."""
    machines: frozenset[str]
    """Hardware of the measurements."""

    def mean(self, quantity: str) -> float:
        """Return the mean of a quantity over seeds."""
        return _mean_size(quantity, self.quantities[quantity])

    def estimated(self, quantity: str) -> Estimate:
        """Return the mean of a quantity over seeds with its interval."""
        values = self.quantities[quantity]
        found = ratio([*map(math.log, values)]) if quantity in TIMES else estimate(values)
        assert found is not None
        return found

    @property
    def gains(self) -> list[float]:
        """Gains over dense by seed; negative for losses."""
        return [*map(self.metric.gain, self.values, self.dense)]

    @property
    def gain(self) -> float:
        """Mean gain over dense."""
        return _mean(self.gains)

    @property
    def goodness(self) -> list[float]:
        """Values by seed, turned so that larger ones are better."""
        return [*self.values] if self.metric.better == "higher" else [-value for value in self.values]

    def told(self, against: Sequence[str]) -> str:
        """Return a sentence with the primary metric, its interval, and the quantities."""
        value = estimate(self.values)
        difference = estimate([value - dense for value, dense in zip(self.values, self.dense, strict=True)])
        assert value is not None
        interval = ""
        if value.low is not None and value.high is not None and has_spread(value):
            interval = f" [{self.metric.written(value.low)}, {self.metric.written(value.high)}]"
        sizes = ", ".join(_written(name, self.estimated(name)) for name in against)
        return (
            f"{self.candidate.name}: {sizes}; {self.metric.title} {self.metric.said(value.mean)}{interval}, "
            f"{in_words(difference, self.metric)} against dense"
        )


def placed(
    candidate: Candidate, networks: Sequence[Cell], seen: Seen, quantities: Sequence[str], against: Sequence[str]
) -> Placed | None:
    """Return a candidate with its figures; None if a network failed or a quantity was not measured.

    Args:
        candidate: the candidate
        networks: its networks, by seed
        seen: figures of the networks
        quantities: all quantities that the search reads
        against: those to make small
    """
    found = [figures for cell in networks if (figures := seen[cell]) is not None]
    if len(found) < len(networks):
        return None
    values, sizes = [figures.value for figures in found], dict[str, Sequence[float]]()
    for name in quantities:
        sizes[name] = measured = [size for figures in found if (size := figures.quantity(name)) is not None]
        if len(measured) < len(found):
            return None
    machines = _NONE
    if not MEASURED.keys().isdisjoint(quantities):
        changed = (figures.quantity(DEPLOYED) for figures in found)
        values = [value if each is None else each for value, each in zip(values, changed, strict=True)]
        if not all(map(math.isfinite, values)):
            return None
        machines = frozenset(figures.machine() for figures in found)
    metric = found[0].metric
    return Placed(
        candidate,
        tuple(networks),
        metric,
        values,
        [figures.dense for figures in found],
        sizes,
        (metric.gain(0.0, _mean(values)), *[_mean_size(name, sizes[name]) for name in against]),
        machines,
    )


def answers(
    label: str, front: Sequence[Placed], against: Sequence[str], candidates: int, volume: float
) -> Iterator[Answer]:
    """Yield the size of the frontier, then each network of it, the smallest by the first quantity first."""
    names = ", ".join(name.replace("_", " ") for name in against)
    machines = sorted({machine for each in front for machine in each.machines})
    apart = f"; measured on several kinds of machines ({'; '.join(machines)})" if len(machines) > 1 else ""
    yield Answer(
        f"frontier{label} of {front[0].metric.title} on validation against {names}: {len(front)} of "
        f"{counted(candidates, 'candidate')}, hypervolume {volume:.3f}{apart}"
    )
    for each in sorted(front, key=lambda each: each.objectives[1:]):
        yield Answer(each.told(against), tuple(cell.network for cell in each.networks))


def nothing(label: str, found: Sequence[Placed], within: float | None, limits: Mapping[str, float]) -> Answer:
    """Say that no network meets the constraints, which one comes closest to dense, and the smallest by each limit."""
    if not found:
        return Answer(f"no network{label} has finished with all its figures")
    metric = found[0].metric
    asked = [] if within is None else [f"within {metric.written(within)}{unit_of(metric)} of dense"]
    asked += [f"at most {_written(name, Estimate(1, limit))}" for name, limit in limits.items()]
    best = max(found, key=lambda each: each.gain)
    told = [f"the closest to dense: {best.told([*limits])}"]
    told += [f"the smallest: {min(found, key=methodcaller('mean', name)).told([name])}" for name in limits]
    return Answer(f"no network{label} is {' with '.join(asked)}; {'; '.join(told)}")


def _written(name: str, found: Estimate) -> str:
    """Return the mean of a quantity with its interval over seeds, if it varies."""
    written, unit = WRITTEN[name]
    if found.low is None or found.high is None or not has_spread(found):
        return f"{written(found.mean)} {unit}"
    return f"{written(found.mean)} [{written(max(found.low, 0.0))}, {written(found.high)}] {unit}"


def _mean_size(quantity: str, values: Sequence[float]) -> float:
    """Return the mean of a quantity."""
    return math.exp(_mean([*map(math.log, values)])) if quantity in TIMES else _mean(values)


def _mean(values: Collection[float]) -> float:
    return math.fsum(values) / len(values)
