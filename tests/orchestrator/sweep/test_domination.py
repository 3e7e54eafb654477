"""Non-dominated points and hypervolumes by hand, and against plain loops over all points and all cells."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest

from orchestrator.sweep.search.frontier_points import Objectives, dominates, hypervolume, nondominated


def cells(points: Sequence[Objectives], reference: Objectives) -> int:
    """Count the unit cells of a grid that lie in a box [p, reference]."""
    lower = itertools.product(*(range(int(end)) for end in reference))
    return sum(any(all(a <= b for a, b in zip(point, cell, strict=True)) for point in points) for cell in lower)


def drawn(generator: random.Random, count: int, objectives: int, most: int) -> list[Objectives]:
    return [tuple(float(generator.randrange(most)) for _ in range(objectives)) for _ in range(count)]


def test_domination_needs_one_smaller_value_and_no_larger_one() -> None:
    assert dominates((1, 2), (1, 3))
    assert not dominates((1, 2), (1, 2))
    assert not dominates((1, 3), (2, 2))


def test_equal_points_stay_together() -> None:
    assert nondominated([(2.0, 1.0), (1.0, 2.0), (2.0, 2.0), (1.0, 2.0), (1.0, 3.0)]) == [0, 1, 3]
    assert nondominated([]) == []


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
def test_nondominated_points_are_those_of_a_plain_loop(objectives: int) -> None:
    generator = random.Random(objectives)
    for _ in range(100):
        points = drawn(generator, 25, objectives, 6)
        plain = [i for i, each in enumerate(points) if not any(dominates(other, each) for other in points)]
        assert nondominated(points) == plain


def test_a_hypervolume_by_hand() -> None:
    assert hypervolume([(1.0, 3.0), (2.0, 1.0)], (4.0, 4.0)) == 3 * 1 + 2 * 2
    assert hypervolume([(0.0, 0.0, 1.0), (1.0, 1.0, 0.0)], (2.0, 2.0, 2.0)) == 4 + 2 - 1
    assert hypervolume([(1.0, 1.0), (5.0, 0.0)], (4.0, 4.0)) == 9, "a point beyond the reference counts for nothing"
    assert hypervolume([], (1.0, 1.0)) == 0.0


@pytest.mark.parametrize("objectives", [1, 2, 3, 4])
def test_hypervolumes_are_those_of_counted_cells(objectives: int) -> None:
    generator = random.Random(objectives)
    reference = tuple(5.0 for _ in range(objectives))
    for count in (1, 2, 5, 9):
        points = drawn(generator, count, objectives, 6)
        assert hypervolume(points, reference) == pytest.approx(cells(points, reference))
