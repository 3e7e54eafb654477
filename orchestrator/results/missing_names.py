"""Errors for unknown names and choices, with close matches."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.plain_data import quoted
from orchestrator.core.redact import shown

LISTED = 10
"""Maximum number of known names listed in a message."""


class ResultsError(OrchestratorError):
    """Requested result does not exist; the message lists what exists."""


def no_choice(argument: str, value: object, choices: Sequence[str]) -> ResultsError:
    """Return the error for a value that is not among the choices."""
    near = get_close_matches(str(value), choices, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else "."
    return ResultsError(f"`{argument}` (={quoted(value)}) must be one of {', '.join(choices)}{meant}")


def not_there(argument: str, value: object, known: Sequence[str], what: str) -> ResultsError:
    """Return the error for an unknown name.

    Args:
        argument: name of the argument
        value: unknown name
        known: known names
        what: subject and verb before the known names, for example `the sweep has`
    """
    near = get_close_matches(str(value), known, n=3)
    more = f" and {len(known) - LISTED} more" if len(known) > LISTED else ""
    held = f"{', '.join(map(repr, known[:LISTED]))}{more}" if known else "none"
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return ResultsError(shown(f"`{argument}` (={quoted(value)}) is not there; {meant}{what} {held}."))
