"""Means with Student's t intervals, differences paired by seed, and non-inferiority tests of these differences."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

from orchestrator.core.metrics import Metric

K = TypeVar("K")
LEVEL = 0.95
"""Level of two-sided intervals; their lower ends are one-sided limits of level (1 + LEVEL) / 2."""

Match = Literal["yes", "no", "untested", "not tested"]
"""`untested`: the seeds have no spread to test with; `not tested`: the sequence of tests ended before it."""
LEAST_SPREAD = 1e-9
"""Interval width up to which differences are equal except for rounding. With few seeds and few test images
differences can be equal by chance, and would then match at any loss."""


@dataclass(frozen=True)
class Estimate:
    """Mean of `n` values, their standard deviation (n - 1 in the denominator) and the interval of the mean.

    One value has no deviation and no interval: `std`, `low` and `high` are None.
    """

    n: int
    mean: float
    std: float | None = None
    low: float | None = None
    high: float | None = None


@cache
def t_quantile(level: float, degrees: int) -> float:
    """Return the two-sided quantile of Student's t, by which the standard error is multiplied."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + level / 2))


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """Return mean, deviation and t interval of `values`; None if there are none or one is not finite.

    mean +- t(level, n - 1) * std / sqrt(n)
    """
    n = len(values)
    if n == 0 or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(1, mean)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    return at_level(Estimate(n, mean, std), level)


def at_level(found: Estimate, level: float) -> Estimate:
    """Return the same estimate with an interval of another level, if it has one."""
    if found.std is None:
        return found
    half = t_quantile(level, found.n - 1) * found.std / math.sqrt(found.n)
    return Estimate(found.n, found.mean, found.std, found.mean - half, found.mean + half)


def ratio(log_ratios: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """Return the geometric mean of ratios with its interval, from their logarithms; `std` is the logarithms' own.

    exp(mean +- t(level, n - 1) * std / sqrt(n))
    """
    found = estimate(log_ratios, level)
    if found is None or found.low is None or found.high is None:
        return None if found is None else Estimate(found.n, math.exp(found.mean))
    return Estimate(found.n, math.exp(found.mean), found.std, math.exp(found.low), math.exp(found.high))


def ratio_of_sums(values: Sequence[float], sizes: Sequence[int], level: float = LEVEL) -> Estimate | None:
    """Return sum(values) / sum(sizes) with its t interval over the n pairs; None as `estimate`.

    For n pairs (v, s) with the ratio r and the mean size m, the deviation is that of the residuals:

        std = sqrt(sum((v - r s)^2) / (n - 1)) / m

    With equal sizes the result is `estimate` of the v / s.
    """
    n, whole = len(values), sum(sizes)
    if not n or not whole or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / whole
    if n == 1:
        return Estimate(1, mean)
    squares = math.fsum((value - mean * size) ** 2 for value, size in zip(values, sizes, strict=True))
    return at_level(Estimate(n, mean, math.sqrt(squares / (n - 1)) * n / whole), level)


def paired_difference(values: Mapping[K, float], reference: Mapping[K, float], level: float = LEVEL) -> Estimate | None:
    """Estimate `values[seed] - reference[seed]` over the seeds that both have."""
    return estimate([values[seed] - reference[seed] for seed in values if seed in reference], level)


def matches(differences: Iterable[Estimate | None], metric: Metric) -> Iterator[Match]:
    """Test differences in order for non-inferiority to dense, and stop at the first that fails.

    A difference passes ("yes") if the one-sided 97.5% limit of the loss lies below the margin. For a metric where
    higher is better:

        mean - t(0.975, n - 1) * std / sqrt(n) > -margin

    The order is fixed beforehand, so the chance that any "yes" is false stays 2.5% over the sequence (Maurer, Hothorn
    and Lehmacher, "Multiple comparisons in drug clinical trials", 1995). A difference without spread over seeds is
    "untested" and does not end the sequence; after a "no" all differences are "not tested".

    Args:
        differences: value - dense by seed, for each point in order; None, which fails, if a value is not finite
        metric: gives the better direction, and the margin: smaller losses count as a match
    """
    failed = False
    for difference in differences:
        if failed:
            yield "not tested"
        elif difference is not None and not has_spread(difference):
            yield "untested"
        else:
            failed = difference is None or not least_gain(difference, metric) > -metric.margin
            yield "no" if failed else "yes"


def has_spread(difference: Estimate) -> bool:
    """Whether differences vary over seeds by more than rounding, so that they can be tested."""
    return (
        difference.low is not None and difference.high is not None and difference.high - difference.low > LEAST_SPREAD
    )


def least_gain(difference: Estimate, metric: Metric) -> float:
    """Return the least gain that the interval allows (one-sided 97.5% limit); negative for a loss."""
    limit = difference.low if metric.better == "higher" else difference.high
    assert limit is not None
    return limit if metric.better == "higher" else -limit
