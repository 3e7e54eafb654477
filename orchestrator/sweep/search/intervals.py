"""Student's t intervals of many candidates at once, as `estimate` of the comparison gives one by one. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from orchestrator.compare.statistics import LEAST_SPREAD, t_quantile

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Rows = Sequence[Sequence[float]]
"""Values of each candidate by seed; all have equally many."""


def lower_ends(rows: Rows, level: float) -> list[float]:
    """Return the lower end of each row's interval; the mean of a row with one value."""
    low, _ = _ends(_array(rows), level)
    return [float(each) for each in low]


def are_worse(rows: Rows, best: Sequence[float], level: float) -> list[bool]:
    """Return which rows an interval of their differences from `best` shows to be smaller, paired by seed.

    A difference without spread shows nothing. A row that is not finite is smaller than a finite `best`.
    """
    import numpy as np

    given, limit = _array(rows), np.asarray(best, dtype=np.float64)
    if not np.isfinite(limit).all():
        return [False] * len(given)
    finite = np.logical_and.reduce(np.isfinite(given), axis=1)
    low, high = _ends(np.where(finite[:, np.newaxis], given - limit, 0.0), level)
    shown = ~finite | ((high < 0) & (high - low > LEAST_SPREAD))
    return [bool(each) for each in shown]


def _array(rows: Rows) -> NDArray[np.float64]:
    import numpy as np

    return np.array(rows, dtype=np.float64)


def _ends(given: NDArray[np.float64], level: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of the interval of each row's mean, mean -+ t(level, n - 1) std / sqrt(n)."""
    n = given.shape[1]
    mean = _sum(given) / n
    if n == 1:
        return mean, mean
    squares = _sum((given - mean.reshape(-1, 1)) ** 2)
    half = t_quantile(level, n - 1) / math.sqrt(n) * (squares / (n - 1)) ** 0.5
    return mean - half, mean + half


def _sum(given: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each row, added from the left, so that every machine rounds in the same way."""
    total = given[:, 0].copy()
    for place in range(1, given.shape[1]):
        total += given[:, place]
    return total
