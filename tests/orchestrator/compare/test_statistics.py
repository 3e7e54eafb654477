from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from orchestrator.compare.statistics import estimate, paired_difference

accuracies = st.lists(st.floats(0, 1), min_size=2, max_size=12)


def test_golden_by_hand() -> None:
    found = estimate([0.96, 0.97, 0.98])

    assert found is not None
    assert found.n == 3
    assert found.mean == pytest.approx(0.97)
    assert found.std == pytest.approx(0.01)
    # t(0.975, 2) = 4.30265, times 0.01 / sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.97 - 0.0248414, 0.97 + 0.0248414), abs=1e-6)


@given(accuracies)
def test_intervals_agree_with_scipy(values: list[float]) -> None:
    found = estimate(values)

    assert found is not None
    error = stats.sem(values)
    low, high = (
        stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error) if error else (found.mean,) * 2
    )
    assert found.mean == pytest.approx(np.mean(values))
    assert found.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-9)


def test_pairing_agrees_with_scipys_paired_test() -> None:
    pruned, dense = [0.95, 0.93, 0.96, 0.94], [0.97, 0.96, 0.97, 0.97]
    found = paired_difference(dict(enumerate(pruned)), dict(enumerate(dense)))

    assert found is not None
    interval = stats.ttest_rel(pruned, dense).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_pairs_are_made_of_common_seeds_only() -> None:
    found = paired_difference({0: 0.5, 1: 0.7, 2: 0.1}, {1: 0.6, 0: 0.6, 3: 0.0})

    assert found is not None
    assert found.n == 2
    assert found.mean == pytest.approx(0.0)
    assert paired_difference({0: 1.0}, {1: 1.0}) is None


def test_one_value_has_no_interval() -> None:
    found = estimate([0.9])

    assert found is not None
    assert (found.mean, found.std, found.low, found.high) == (0.9, None, None, None)


def test_nothing_and_what_is_not_finite_have_no_estimate() -> None:
    assert estimate([]) is None
    assert estimate([0.9, math.nan]) is None
