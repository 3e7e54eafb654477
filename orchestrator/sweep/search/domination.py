"""Non-dominated points and their hypervolume, if every objective is to be small. Pure.

Point p dominates point q if p is at most q in every objective and below q in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Objectives = tuple[float, ...]
"""Values of a network, all to be made small."""


def dominates(one: Objectives, other: Objectives) -> bool:
    """Whether `one` is at most `other` in every objective, and below `other` in one."""
    return one != other and all(a <= b for a, b in zip(one, other, strict=True))


def nondominated(points: Sequence[Objectives]) -> list[int]:
    """Return the indices of the points that no other point dominates, in order; equal points stay together.

    In lexicographic order a point can only be dominated by a point before it, and then by a non-dominated one.
    """
    found: list[int] = []
    front: list[Objectives] = []
    lowest = math.inf  # of the last objective of two
    for index in sorted(range(len(points)), key=points.__getitem__):
        point = points[index]
        if front and point != front[-1]:
            behind = point[1] >= lowest if len(point) == 2 else any(dominates(each, point) for each in front)
            if behind:
                continue
        found.append(index)
        if not front or point != front[-1]:
            front.append(point)
            lowest = min(lowest, point[-1])
    return sorted(found)


def hypervolume(points: Sequence[Objectives], reference: Objectives) -> float:
    """Return the volume that the points dominate below a reference point, exactly.

    For points P and reference r it is the volume of the union of the boxes [p, r], for p in P with p < r in every
    objective. Two objectives are summed in strips. With more, each point adds the part of its own box that the boxes of
    later points leave:

        volume(p_1, ..., p_n) = sum_i (box(p_i) - volume(max(p_i, p_{i+1}), ..., max(p_i, p_n)))

    Args:
        points: points; those beyond the reference count for nothing
        reference: upper end of every objective

    Reference: While, Bradstreet and Barone 2012, IEEE Transactions on Evolutionary Computation 16(1) (WFG).
    """
    inside = [point for point in points if all(a < b for a, b in zip(point, reference, strict=True))]
    front = sorted({inside[index] for index in nondominated(inside)})
    if len(reference) <= 2:
        return _strips(front, reference)
    return math.fsum(_added(point, front[place:], reference) for place, point in enumerate(front, start=1))


def _strips(front: Sequence[Objectives], reference: Objectives) -> float:
    """Sum the strips of sorted non-dominated points with one or two objectives."""
    if len(reference) == 1:
        return max((reference[0] - point[0] for point in front), default=0.0)
    tops = [reference[1], *(point[1] for point in front)]
    return math.fsum((reference[0] - point[0]) * (top - point[1]) for point, top in zip(front, tops[:-1], strict=True))


def _added(point: Objectives, others: Sequence[Objectives], reference: Objectives) -> float:
    """Return the volume of a point's box outside of the boxes of other points."""
    shared = [tuple(map(max, point, other)) for other in others]
    box = math.prod(b - a for a, b in zip(point, reference, strict=True))
    return box - hypervolume(shared, reference)
