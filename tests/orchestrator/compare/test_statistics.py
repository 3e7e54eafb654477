from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from factories import ACCURACY
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from orchestrator.compare.statistics import estimate, matches, paired_difference, ratio
from orchestrator.core.metrics import Metric

accuracies = st.lists(st.floats(0, 1), min_size=2, max_size=12)


def test_golden_by_hand() -> None:
    found = estimate([0.96, 0.97, 0.98])

    assert found is not None
    assert found.n == 3
    assert found.mean == pytest.approx(0.97)
    assert found.std == pytest.approx(0.01)
    # t(0.975, 2) = 4.30265, times 0.01 / sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.97 - 0.0248414, 0.97 + 0.0248414), abs=1e-6)


def test_a_ratio_is_the_geometric_mean_with_an_interval_on_the_logarithms() -> None:
    found, one = ratio([math.log(2), math.log(8)]), ratio([math.log(3)])

    assert found is not None
    assert one is not None
    assert found.mean == pytest.approx(4)
    # t(0.975, 1) = 12.7062, times std = log(4) / sqrt(2), by sqrt(2): log(4) / 2
    factor = math.exp(12.7062 * math.log(4) / 2)
    assert (found.low, found.high) == pytest.approx((4 / factor, 4 * factor), rel=1e-4)
    assert (one.mean, one.low, one.high) == (pytest.approx(3), None, None)
    assert ratio([]) is None


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


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_a_loss_of_the_margin_is_called_a_match_in_one_line_of_forty(seeds: int) -> None:
    """Simulate lines of four points that lose exactly the margin, with normal noise, for which the t-test is exact."""
    lines, margin = 8000, 0.01
    losses = np.random.default_rng(seeds).normal(-margin, 0.006, (lines, 4, seeds))
    false = sum("yes" in matches(map(estimate, line.tolist()), replace(ACCURACY, margin=margin)) for line in losses)

    assert stats.binomtest(false, lines, 0.025).pvalue > 1e-4, f"{false / lines:.4f} instead of 0.025"


@pytest.mark.parametrize("seeds", [2, 3])
def test_few_test_images_do_not_add_false_matches(seeds: int) -> None:
    """Simulate 360 images, 1.5% newly wrong and 0.5% newly right: two seeds have equal losses in one of ten cases."""
    lines, images, draw = 8000, 360, np.random.default_rng(seeds)
    gains = (draw.poisson(1.8, (lines, 4, seeds)) - draw.poisson(5.4, (lines, 4, seeds))) / images
    false = sum("yes" in matches(map(estimate, line.tolist()), ACCURACY) for line in gains)

    assert false / lines < 0.025 + 3 * math.sqrt(0.025 * 0.975 / lines)


def test_a_match_agrees_with_scipys_one_sided_test() -> None:
    differences = np.random.default_rng(0).normal(-0.004, 0.004, (200, 4))
    found = [next(matches([estimate(row.tolist())], ACCURACY)) for row in differences]
    tests = stats.ttest_1samp(differences, -0.01, axis=1, alternative="greater").pvalue < 0.025

    assert found == ["yes" if passed else "no" for passed in tests]
    assert 20 < sum(tests) < 180


def test_what_is_untested_does_not_end_the_sequence() -> None:
    good, bad, one = estimate([0.0, 0.001]), estimate([-0.5, -0.4]), estimate([0.0])

    assert list(matches([one, good, one, None, good], replace(ACCURACY, margin=0.02))) == [
        "untested",
        "yes",
        "untested",
        "no",
        "not tested",
    ]
    assert list(matches([good, bad, one], replace(ACCURACY, margin=0.02))) == ["yes", "no", "not tested"]


def test_where_less_is_better_the_upper_end_decides() -> None:
    loss = Metric("loss", "", "lower", margin=0.1, format=".3f")

    assert list(matches([estimate([0.01, 0.02]), estimate([0.3, 0.4])], loss)) == ["yes", "no"]
    assert list(matches([estimate([-0.3, -0.4])], loss)) == ["no"]  # 0.35 less on average, in [-0.99, 0.29]
    assert list(matches([estimate([-0.39, -0.4])], loss)) == ["yes"]
