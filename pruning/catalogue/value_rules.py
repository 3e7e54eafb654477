"""Rules for single values: a predicate, and the text of its error message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard

LARGEST = 2**63 - 1
"""Largest integer of 64 bits, which records and tensors hold."""


@dataclass(frozen=True)
class Rule:
    """A condition on a value.

    Args:
        holds: whether a value keeps the rule.
        text: the rest of a sentence that begins with "`key` (=value) must ".
        largest: largest integer that keeps the rule, if `text` does not say so.
    """

    holds: Callable[[Any], bool]
    text: str
    largest: int | None = None

    def demand(self, value: Any) -> str:
        """Return the rest of the sentence for a value that breaks the rule."""
        is_beyond = self.largest is not None and is_int(value) and value > self.largest
        return f"be at most {self.largest}" if is_beyond else self.text

    def or_null(self, remedy: str = ", or null") -> Rule:
        """Return a rule that also accepts null."""
        return Rule(lambda value: value is None or self.holds(value), f"{self.text}{remedy}", self.largest)


def one_of(*choices: str) -> Rule:
    """Return the rule that a value is one of several words."""
    return Rule(lambda value: value in choices, f"be one of {', '.join(choices)}")


def at_least(least: float, remedy: str = "") -> Rule:
    """Return the rule that a value is a finite number of at least `least`."""
    return Rule(lambda value: is_number(value) and least <= value < float("inf"), f"be at least {least}{remedy}")


def above(least: float, remedy: str = "") -> Rule:
    """Return the rule that a value is a finite number above `least`."""
    return Rule(lambda value: is_number(value) and least < value < float("inf"), f"be above {least}{remedy}")


def whole(least: int, remedy: str = "") -> Rule:
    """Return the rule that a value is an integer of at least `least`, in 64 bits."""
    text = f"be an integer of at least {least}{remedy}"
    return Rule(lambda value: is_int(value) and least <= value <= LARGEST, text, LARGEST)


def within(remedy: str) -> Rule:
    """Return the rule that a value is a fraction strictly between 0 and 1."""
    return Rule(lambda value: is_number(value) and 0 < value < 1, f"lie in (0, 1){remedy}")


def is_number(value: Any) -> bool:
    """Return whether a value is an int or a float, but not a bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: Any) -> TypeGuard[int]:
    """Return whether a value is an int, but not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)
