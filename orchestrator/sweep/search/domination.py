"""Non-dominated points and their hypervolume, if every objective is to be small. Pure.

Point p dominates point q if p is at most q in every objective and below q in one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import le

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
