"""Rules for single values: a predicate, and the rest of the sentence that refuses a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeGuard


@dataclass(frozen=True)
class Rule:
    """A condition on a value.

    Args:
        holds: whether a value keeps the rule.
        text: the rest of a sentence that begins with "`key` (=value) must ".
    """

    holds: Callable[[Any], bool]
    text: str

    def or_null(self, remedy: str = ", or null") -> Rule:
        """Return the rule that accepts null, too."""
        return Rule(lambda value: value is None or self.holds(value), f"{self.text}{remedy}")


def one_of(*choices: str) -> Rule:
    """Return the rule of a choice among words."""
    return Rule(lambda value: value in choices, f"be one of {', '.join(choices)}")


def at_least(least: float, remedy: str = "") -> Rule:
    """Return the rule of a finite number not below `least`."""
    return Rule(lambda value: is_number(value) and least <= value < float("inf"), f"be at least {least}{remedy}")


def above(least: float, remedy: str = "") -> Rule:
    """Return the rule of a finite number above `least`."""
    return Rule(lambda value: is_number(value) and least < value < float("inf"), f"be above {least}{remedy}")


def whole(least: int, remedy: str = "") -> Rule:
    """Return the rule of an integer not below `least`."""
    return Rule(lambda value: is_int(value) and value >= least, f"be an integer of at least {least}{remedy}")


def within(remedy: str) -> Rule:
    """Return the rule of a fraction strictly between 0 and 1."""
    return Rule(lambda value: is_number(value) and 0 < value < 1, f"lie in (0, 1){remedy}")


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_int(value: Any) -> TypeGuard[int]:
    """Whether a value is an int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)
