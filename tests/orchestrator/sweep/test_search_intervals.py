"""Intervals of many candidates at once: those of the comparison, and the verdicts on rows that are not finite."""

from __future__ import annotations

import math
import random

import pytest

from orchestrator.compare.statistics import estimate
from orchestrator.sweep.search.quantities import are_worse, lower_ends


@pytest.mark.parametrize("seeds", [2, 3, 9])
def test_the_intervals_are_those_of_the_comparison(seeds: int) -> None:
    draw = random.Random(seeds)
    rows = [[draw.gauss(place / 40 - 0.5, 0.3) for _ in range(seeds)] for place in range(60)]
    best = [draw.gauss(0.5, 0.3) for _ in range(seeds)]
    paired = [estimate([a - b for a, b in zip(row, best, strict=True)], 0.9) for row in rows]
    worse = [each is not None and each.high is not None and each.high < 0 for each in paired]
    ends = [found.low for row in rows if (found := estimate(row, 0.9)) is not None]

    assert lower_ends(rows, 0.9) == pytest.approx(ends, rel=1e-12)
    assert are_worse(rows, best, 0.9) == worse
    assert 0 < sum(worse) < len(rows)


def test_a_difference_without_spread_shows_nothing_and_a_failure_is_worse_than_what_has_finished() -> None:
    best, failed = [0.1, 0.2], [-math.inf, 0.3]

    assert are_worse([[0.0, 0.1], [-0.5, -0.31], failed, best], best, 0.9) == [False, True, True, False]
    assert are_worse([failed, best], failed, 0.9) == [False, False]
    assert are_worse([[0.0], [-math.inf]], [0.1], 0.9) == [False, True], "one seed has no interval"
    assert lower_ends([[0.25], [0.5]], 0.9) == [0.25, 0.5]
