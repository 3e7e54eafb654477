"""Errors of the engine about a choice, with the choice, its value and the rule as fields; standard library only."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Self

LONGEST = 200
"""Maximum number of characters of a value in a message."""


class Refused(Exception):
    """Choice that the engine refuses.

    Args:
        key: the choice, as in `scope.n`, or an argument that stands for one, as in `sparsity`.
        value: its value.
        rule: the rest of the sentence: what the choice must be, and what to pass.
    """

    def __init__(self, key: str, value: Any, rule: str = "") -> None:
        super().__init__(key, value, rule)
        self.key, self.value, self.rule = key, value, rule

    def because(self, rule: str) -> Self:
        """Return the error with its rule."""
        return type(self)(self.key, self.value, rule)

    def __str__(self) -> str:
        """Return the sentence for users of the engine."""
        return self.named(self.key)

    def named(self, key: str) -> str:
        """Return the sentence with another name for the choice."""
        value = repr(self.value)
        return f"`{key}` (={value if len(value) <= LONGEST else f'{value[:LONGEST]}...'}) {self.rule}"


class RefusedValue(Refused, ValueError):
    """Choice whose value breaks a rule, or conflicts with another choice."""


class RefusedType(Refused, TypeError):
    """Choice whose value has another type."""


class UnknownOption(RefusedValue):
    """Option that a component does not take."""


def unfit_call(function: Callable[..., Any], *arguments: Any, **named: Any) -> str | None:
    """Return why `function` cannot be called with these arguments; None if it can, or if its signature is unknown."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some compiled functions have none
        return None
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        return f"takes {signature}: {error}"
    return None
