"""Formats of numbers for people, each kind by hand."""

from __future__ import annotations

import math

import pytest

from orchestrator.core.metrics import Metric
from orchestrator.planning.number_formats import (
    at_least,
    byte_size,
    counted,
    duration,
    first_few,
    in_points,
    kilobytes,
    known_duration,
    milliseconds,
    percent,
    ratio,
    ratio_interval,
    scientific,
    significant,
    whole_number,
)


def test_a_percentage_has_its_sign_without_a_space_and_no_negative_zero() -> None:
    assert [percent(0.96875), percent(1.0), percent(0.1, 1), percent(0.05, 0)] == ["96.88%", "100.00%", "10.0%", "5%"]
    assert [percent(-0.1, 1, "+"), percent(0.02, 1, "+"), percent(-0.0001, 1, "+")] == ["-10.0%", "+2.0%", "+0.0%"]
    assert [in_points(0.96875), in_points(-0.00001)] == ["96.88", "0.00"]


def test_whole_numbers_group_their_digits() -> None:
    assert [whole_number(999.4), whole_number(12345.6), whole_number(1_000_000)] == ["999", "12,346", "1,000,000"]
    assert [counted(0, "trial"), counted(1, "trial"), counted(1000, "trial")] == ["0 trials", "1 trial", "1,000 trials"]
    assert first_few(["a", "b", "c"], 2) == "a; b and 1 more"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.05, "0.05×"),
        (1.0, "1.00×"),
        (1.234, "1.23×"),
        (9.994, "9.99×"),
        (9.996, "10.0×"),
        (24.56, "24.6×"),
        (99.96, "100×"),
        (1234.5678, "1,235×"),
    ],
)
def test_a_ratio_has_three_digits(value: float, text: str) -> None:
    assert ratio(value) == text


def test_the_ends_of_a_ratios_interval_have_its_decimals() -> None:
    assert ratio_interval(1.823, 1.7512, 1.9) == "1.82× [1.75, 1.90]"
    assert ratio_interval(12.34, 9.876, 15.0) == "12.3× [9.9, 15.0]"
    assert ratio_interval(2.0, None, None) == "2.00×"


def test_milliseconds_have_three_digits() -> None:
    assert [*map(milliseconds, (0.01234, 0.5, 0.9996, 1.5, 12.345, 1234.5))] == [
        *("0.0123", "0.500", "1.00", "1.50", "12.3", "1,234"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0:00"), (75.4, "1:15"), (3700.0, "1:01:40"), (184440.0, "2 d 03:14"), (-1.0, "0:00")]
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_nothing_is_said_where_all_that_is_known_of_a_duration_is_that_it_is_not_negative() -> None:
    assert [known_duration(0.4, True), known_duration(0.0, True)] == ["", ""]
    assert [known_duration(75.0, True), known_duration(75.0, False)] == ["at least 1:15", "1:15"]
    assert [at_least("1,000 steps", True), at_least("1,000 steps", False)] == ["at least 1,000 steps", "1,000 steps"]


def test_bytes() -> None:
    assert [*map(byte_size, (0, 999, 1500, 999_960, 2.5e6, 3e9, 4e15))] == [
        *("0 B", "999 B", "1.5 kB", "1.0 MB", "2.5 MB", "3.0 GB", "4000.0 TB"),
    ]
    assert kilobytes(1234567) == "1,234.6"


def test_numbers_of_unknown_kinds_and_errors() -> None:
    assert [significant(0.123456), significant(0.123456, 2), scientific(0.00000123)] == ["0.1235", "0.12", "1.2e-06"]


@pytest.mark.parametrize(
    ("form", "value", "width", "texts"),
    [
        (".4g", 0.3930, 0.009971, ("0.393", "0.010")),  # two digits of the width: 0.010
        (".4g", 0.39312, 0.0095, ("0.3931", "0.0095")),
        (".4g", 1234.56, 56.0, ("1235", "56")),
        (".3e", 0.39312, 0.01, ("0.393", "0.010")),
        (".4g", 0.39312, 1e-9, ("0.3931", "1e-09")),  # beyond six decimals the format stays
        (".4g", 0.39312, 0.0, ("0.3931", "0")),
        (".4g", math.nan, math.nan, ("nan", "nan")),
        (".2%", 0.97, 0.009971, ("97.00", "1.00")),  # fixed decimals stay
        (".4f", 0.393, 0.009971, ("0.3930", "0.0100")),
    ],
)
def test_a_value_has_the_decimals_of_its_interval(
    form: str, value: float, width: float, texts: tuple[str, str]
) -> None:
    metric = Metric("error", "", "lower", margin=0.1, format=form)

    assert (metric.written(value, width=width), metric.written(width, width=width)) == texts


def test_a_value_of_a_metric_is_no_negative_zero_and_shows_a_sign_on_request() -> None:
    metric = Metric("accuracy", "%", "higher", margin=0.01, format=".2%")

    assert [metric.written(-0.00001), metric.written(-0.00001, "+"), metric.said(0.97)] == ["0.00", "+0.00", "97.00%"]
