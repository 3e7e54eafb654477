"""Formats of numbers for people: one function for each kind, for the terminal, the report, MLflow and commands. Pure.

`Metric.written` formats values of metrics. Files for programs, such as CSV and JSON, keep full precision instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.core.metrics import in_format


def percent(fraction: float, decimals: int = 2, sign: str = "") -> str:
    """0.96875 -> 96.88%; with `sign` "+": +96.88%."""
    return f"{in_points(fraction, decimals, sign)}%"


def in_points(fraction: float, decimals: int = 2, sign: str = "") -> str:
    """Percentage points, and percentages below a heading that has the unit: 0.96875 -> 96.88."""
    return in_format(fraction, f".{decimals}%", sign)


def whole_number(number: float) -> str:
    """12345.6 -> 12,346."""
    return f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """1 trial, 2 trials, 1,000 trials."""
    return f"{whole_number(number)} {noun}" if number == 1 else f"{whole_number(number)} {noun}s"


def first_few(names: Sequence[str], most: int = 5, joint: str = "; ") -> str:
    """A; b; c; d; e and 13 more."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{joint.join(names[:most])}{more}"


def ratio(value: float) -> str:
    """Ratio with three significant digits from 1 on: 1.234 -> 1.23×, 24.56 -> 24.6×, 1234.5 -> 1,234×."""
    return f"{value:,.{_decimals(value)}f}×"


def ratio_interval(value: float, low: float | None, high: float | None) -> str:
    """Ratio with its interval, all with the ratio's decimals: 1.82× [1.75, 1.90]; without an interval 1.82×."""
    decimals = _decimals(value)
    ends = "" if low is None or high is None else f" [{low:,.{decimals}f}, {high:,.{decimals}f}]"
    return f"{ratio(value)}{ends}"


def milliseconds(value: float) -> str:
    """Milliseconds with three significant digits, without the unit: 0.01234 -> 0.0123, 12.345 -> 12.3."""
    return f"{value:#.3g}" if value < 0.9995 else f"{value:,.{_decimals(value)}f}"


def duration(seconds: float) -> str:
    """75 -> 1:15, 3700 -> 1:01:40, 184440 -> 2 d 03:14."""
    whole = max(0, round(seconds))
    minutes, hours = whole // 60, whole // 3600
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes % 60:02}"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def known_duration(seconds: float, incomplete: bool) -> str:
    """Duration, with "at least" if parts of it are unknown; empty if this says nothing: at least 0:00."""
    return "" if incomplete and not round(seconds) else at_least(duration(seconds), incomplete)


def at_least(text: str, incomplete: bool) -> str:
    """1,000 steps, or at least 1,000 steps if parts of the amount are unknown."""
    return f"at least {text}" if incomplete else text


def byte_size(size: float) -> str:
    """Number of bytes with its unit: 1500 -> 1.5 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if round(size, 1) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def kilobytes(size: float) -> str:
    """Kilobytes below a heading that has the unit: 1234567 -> 1,234.6."""
    return f"{size / 1000:,.1f}"


def significant(value: float, digits: int = 4) -> str:
    """Number of an unknown kind, by its significant digits: 0.123456 -> 0.1235."""
    return f"{value:.{digits}g}"


def scientific(value: float) -> str:
    """Small error of computed values: 0.00000123 -> 1.2e-06."""
    return f"{value:.1e}"


def _decimals(value: float) -> int:
    """Return the decimals that give a number from 1 on three significant digits."""
    return 2 if round(abs(value), 2) < 10 else 1 if round(abs(value), 1) < 100 else 0
