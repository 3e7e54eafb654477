"""Durations, counts and sizes in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence


def counted(number: int, noun: str) -> str:
    """1 trial, 2 trials."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """A; b; c; d; e; and 13 more."""
    more = f"; and {len(names) - most} more" if len(names) > most else ""
    return f"{'; '.join(names[:most])}{more}"


def duration(seconds: float) -> str:
    """75 -> 1:15, 3700 -> 1:01:40, 184440 -> 2 d 03:14."""
    whole = max(0, round(seconds))
    minutes, hours = whole // 60, whole // 3600
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes % 60:02}"
    return f"{hours}:{minutes % 60:02}:{whole % 60:02}" if hours else f"{minutes}:{whole % 60:02}"


def readable(size: float) -> str:
    """1500 -> 1.5 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
