"""Means with Student's t intervals, and differences paired by seed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

K = TypeVar("K")
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """Mean of `n` values, their standard deviation (n - 1 in the denominator) and the interval of the mean.

    With one value there is no deviation and no interval: `std`, `low` and `high` are None.
    """

    n: int
    mean: float
    std: float | None = None
    low: float | None = None
    high: float | None = None


@cache
def t_quantile(level: float, degrees: int) -> float:
    """Return the factor by which the standard error is multiplied: the two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + level / 2))


def estimate(values: Sequence[float], level: float = LEVEL) -> Estimate | None:
    """Return mean, deviation and t interval of `values`; None where there are none or one of them is not finite.

    mean +- t(level, n - 1) * std / sqrt(n)
    """
    n = len(values)
    if n == 0 or not all(map(math.isfinite, values)):
        return None
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(1, mean)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    half = t_quantile(level, n - 1) * std / math.sqrt(n)
    return Estimate(n, mean, std, mean - half, mean + half)


def paired_difference(values: Mapping[K, float], reference: Mapping[K, float], level: float = LEVEL) -> Estimate | None:
    """Return the estimate of `values[seed] - reference[seed]` over the seeds that both have."""
    return estimate([values[seed] - reference[seed] for seed in values if seed in reference], level)
