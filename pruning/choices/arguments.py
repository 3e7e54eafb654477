"""Checks of the arguments of a choice."""

from __future__ import annotations

from collections.abc import Collection
from numbers import Integral, Real
from typing import cast


def one_of(name: str, value: object, kinds: Collection[str]) -> None:
    """Raise ValueError unless a value is one of `kinds`."""
    if value not in kinds:
        raise ValueError(f"`{name}` (={value!r}) must be one of {', '.join(kinds)}.")


def at_least(name: str, value: int, least: int) -> None:
    """Raise TypeError unless a value is an int, ValueError if it is a smaller one."""
    if not isinstance(cast(object, value), Integral):
        raise TypeError(f"`{name}` (={value!r}) must be an int, not {type(value).__name__}.")
    if value < least:
        raise ValueError(f"`{name}` (={value!r}) must be an int of at least {least}.")


def number(name: str, value: float) -> float:
    """Return a number; raise TypeError for what is none."""
    if not isinstance(cast(object, value), Real):
        raise TypeError(f"`{name}` (={value!r}) must be a number, not {type(value).__name__}.")
    return value
