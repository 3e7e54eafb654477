"""Targets of schedules: golden values by hand, and the laws on which plans and masks rely."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pruning.schedule import DECIMALS, KINDS, targets

kinds = st.sampled_from(sorted(KINDS))
sparsities = st.floats(0, 1, exclude_max=True)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("one_shot", (0.875, 0.875, 0.875)),
        ("geometric", (0.5, 0.75, 0.875)),
        ("linear", (0.291666666667, 0.583333333333, 0.875)),
        ("cubic", (0.615740740741, 0.842592592593, 0.875)),
    ],
)
def test_three_rounds_to_seven_eighths(kind, expected):
    assert targets(kind, 0.875, 3) == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("one_shot", (0.8, 0.8)), ("geometric", (0.6, 0.8)), ("linear", (0.5, 0.8)), ("cubic", (0.725, 0.8))],
)
def test_a_start_that_is_already_sparse(kind, expected):
    # geometric: densities 0.8 -> sqrt(0.8 * 0.2) = 0.4 -> 0.2
    assert targets(kind, 0.8, 2, start=0.2) == expected


def test_geometric_is_what_a_container_composes():
    # pruning 0.2 of the survivors four times leaves 0.8^4, and each earlier round leaves a lower power of 0.8
    assert targets("geometric", 1 - 0.8**4, 4) == pytest.approx((0.2, 0.36, 0.488, 0.5904), abs=1e-12)


def test_longer_geometric_schedules_share_their_prefix():
    assert targets("geometric", 0.5, 2) == targets("geometric", 0.875, 6)[:2]


@given(kinds, sparsities, st.integers(1, 30), st.floats(0, 1))
def test_laws(kind, sparsity, rounds, fraction):
    start = min(fraction * sparsity, sparsity)
    found = targets(kind, sparsity, rounds, start)
    assert len(found) == rounds
    assert found[-1] == sparsity
    assert all(a <= b for a, b in zip((start, *found), found, strict=False))
    assert all(value in (start, sparsity, round(value, DECIMALS)) for value in found)
    assert all(type(value) is float for value in found)


@given(kinds, sparsities)
def test_one_round_prunes_everything_at_once(kind, sparsity):
    assert targets(kind, sparsity, 1) == (sparsity,)


@pytest.mark.parametrize("sparsity", [Fraction(1, 2), np.float64(0.5), 0.5])
def test_any_real_number_will_do(sparsity):
    assert targets("linear", sparsity, 2) == (0.25, 0.5)
    assert targets("linear", 0, 2) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("geometry", 0.5, 2), ValueError, r"`kind` \(='geometry'\) .* one_shot, geometric, linear, cubic"),
        (("linear", 1.2, 2), ValueError, r"`sparsity` \(=1\.2\) must lie in \[0, 1\)"),
        (("linear", 1.0, 2), ValueError, r"`sparsity` \(=1\.0\)"),
        (("linear", -0.1, 2), ValueError, r"`sparsity` \(=-0\.1\)"),
        (("linear", float("nan"), 2), ValueError, r"`sparsity` \(=nan\)"),
        (("linear", "0.5", 2), TypeError, r"`sparsity` \(='0\.5'\)"),
        (("linear", True, 2), TypeError, r"`sparsity` \(=True\)"),
        (("linear", 0.5, 0), ValueError, r"`rounds` \(=0\) must be at least 1"),
        (("linear", 0.5, 2.0), TypeError, r"`rounds` \(=2\.0\)"),
        (("linear", 0.5, 2, 0.6), ValueError, r"`start` \(=0\.6\) must lie in \[0, sparsity\]"),
        (("linear", 0.5, 2, -0.1), ValueError, r"`start` \(=-0\.1\)"),
    ],
)
def test_refusals_name_argument_value_and_rule(arguments, error, message):
    with pytest.raises(error, match=message):
        targets(*arguments)
