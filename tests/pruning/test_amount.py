"""Amounts: validation, and counts from fractions."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.utils.prune as torch_prune
from hypothesis import given
from hypothesis import strategies as st

from pruning.choices import axes as amounts


@pytest.mark.parametrize("bad", ["0.5", None, torch.tensor(0.5), Decimal("0.5"), [0.5], 0.5j])
def test_only_real_numbers_are_amounts(bad: object) -> None:
    with pytest.raises(TypeError, match="must be an int or a float"):
        amounts.validate_amount(bad)


@pytest.mark.parametrize("bad", [1.1, 20.0, -0.1, float("nan"), float("inf"), -10, np.float32(1.5), Fraction(3, 2)])
def test_amounts_out_of_range_are_refused_at_construction(bad: object) -> None:
    with pytest.raises(ValueError, match=r"`amount` \(="):
        amounts.validate_amount(bad)


def test_the_message_names_argument_value_rule_and_remedy() -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the whole text is compared
        amounts.validate_amount(1.2)
    assert str(caught.value) == ("`amount` (=1.2) must lie in [0, 1] when it is a float; pass an int to prune a count.")


@pytest.mark.parametrize("good", [0, 1, 1500, 0.0, 0.34, 1.0, np.float32(0.5), np.int64(3), Fraction(1, 3), True])
def test_every_real_number_in_range_is_accepted(good: amounts.Amount) -> None:
    amounts.validate_amount(good)


@pytest.mark.parametrize(
    ("amount", "size", "count"),
    [
        (0, 15, 0),
        (10, 15, 10),
        (1, 15, 1),
        (1.0, 15, 15),
        (0.4, 17, 7),
        (0.5, 5, 2),
        (0.5, 3, 2),
        (0.5, 1, 0),
        (Fraction(1, 2), 3, 2),
        (np.float32(0.25), 8, 2),
        (np.int64(3), 8, 3),
        (0.3, 0, 0),
    ],
)
def test_counts_by_hand(amount: amounts.Amount, size: int, count: int) -> None:
    result = amounts.count_to_prune(amount, size)
    assert result == count
    assert type(result) is int


@given(st.floats(0, 1), st.integers(0, 10**7))
def test_counts_are_those_of_torch(amount: float, size: int) -> None:
    theirs = torch_prune._compute_nparams_toprune(amount, size)  # type: ignore[no-untyped-call]
    assert amounts.count_to_prune(amount, size) == theirs


@given(st.integers(0, 50), st.integers(0, 50))
def test_an_int_must_fit(amount: int, size: int) -> None:
    if amount > size:
        with pytest.raises(ValueError, match="must not exceed"):
            amounts.resolve_amount(amount, size)
    else:
        assert amounts.resolve_amount(amount, size) == amount


def test_a_float_always_fits() -> None:
    amounts.check_amount_fits(0.3, 0)
    amounts.check_amount_fits(1.0, 0)
