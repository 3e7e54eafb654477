"""Which troubles with MLflow may pass, and which no wait can mend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from textwrap import shorten

from orchestrator.config.tracking_uri import sqlite_path
from orchestrator.core.errors import CannotKeep, OrchestratorError
from orchestrator.views.tracking import view_database

LONGEST_REASON = 240
"""Characters of what MLflow says, which may be several sentences."""
_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_STATE"}


def is_refusal(error: Exception) -> bool:
    """Whether MLflow answered that it will never take this, as against being away or busy."""
    from sqlalchemy.exc import ArgumentError  # of a URI that names no kind of database

    return isinstance(error, ImportError | ArgumentError) or getattr(error, "error_code", None) in _REFUSALS


@contextmanager
def lasting_told(uri: str) -> Iterator[None]:
    """Turn a trouble at opening that no wait can mend into `CannotKeep`; let all others through."""
    try:
        yield
    except (OrchestratorError, OSError):
        raise
    except Exception as error:
        reason = shorten(str(error), LONGEST_REASON, placeholder=" ...").rstrip(".")
        if is_refusal(error):
            raise CannotKeep(f"{reason}; {view_database.ELSEWHERE}") from error
        if (database := sqlite_path(uri)) is not None and not view_database.may_pass(error):
            remedy = f"move {database} away, and `python -m orchestrator.sync` completes the view in a new one"
            raise CannotKeep(f"{reason}; or {remedy}") from error
        raise
