"""The SQLite file that holds a view in MLflow: made whole or not at all, and told apart from one that is half made.

MLflow makes a database in some forty migrations on the file itself. Killed among them, or at it twice at once, it
leaves what it can neither use nor mend. So here they are done elsewhere, and the outcome is copied in one transaction:
SQLite takes back what is not committed, lets one driver in at a time, and takes an empty file for a new database.
"""

from __future__ import annotations

import errno
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path

from orchestrator.core.errors import CannotKeep, OrchestratorError

MIGRATING = 5.0
"""Seconds without a change after which nobody is at work any more on a database that is half made."""

LOCK_SECONDS = 20.0
"""How long another process may hold the database: as long as MLflow waits, and longer than the migrations take."""

ELSEWHERE = "name another place with `tracking.uri` (`--uri`) or MLFLOW_TRACKING_URI"
_PASSING_ERRNO = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_PASSING = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_NOMEM)


def ensure(path: Path, statements: Callable[[], Iterable[str]]) -> None:
    """See that a whole database stands at `path` and can be written: make it from `statements` where there is none.

    Raises:
        CannotKeep: it cannot be made or written there, or was left half made
        sqlite3.Error, OSError: it is locked or the disk is full, which may pass
        OrchestratorError: another process is making it
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")  # fails where only reading is allowed; the second driver waits here
            if _tables(connection):
                _refuse_half_made(path, connection)
                return
            for statement in statements():
                connection.execute(statement)
            connection.execute("COMMIT")
    except sqlite3.Error as error:
        if may_pass(error):
            raise
        raise CannotKeep(f"{path} cannot be opened or written: {error}; move it away or {ELSEWHERE}") from error
    except OSError as error:
        if error.errno in _PASSING_ERRNO:
            raise
        raise CannotKeep(f"{path} cannot be opened or made: {error.strerror}; {ELSEWHERE}") from error


def require(path: Path) -> None:
    """Raise `OrchestratorError` unless a whole database stands at `path`; make nothing."""
    try:
        if not path.stat().st_size:
            raise FileNotFoundError(errno.ENOENT, "it is empty")
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=rw", uri=True)) as connection:
            _refuse_half_made(path, connection)
    except (OSError, sqlite3.Error) as error:
        raise OrchestratorError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


def may_pass(error: BaseException | None) -> bool:
    """Whether an error, or what caused it, is of a database that was locked, or of a full disk."""
    while error is not None:
        if isinstance(error, sqlite3.Error):
            code = getattr(error, "sqlite_errorcode", None)
            return code is not None and code & 0xFF in _PASSING
        error = error.__cause__
    return False


def half_made(path: Path) -> str:
    """Return what to do about a database that MLflow was kept from finishing."""
    return (
        f"{path} is only half made, as its making was interrupted, and MLflow cannot finish it. "
        "Move that file away; `python -m orchestrator.sync` then completes the view"
    )


def _refuse_half_made(path: Path, connection: sqlite3.Connection) -> None:
    tables = _tables(connection)
    begun = any(name.startswith("_alembic_tmp_") for name in tables)
    if not begun and "experiments" in tables and connection.execute("SELECT 1 FROM experiments").fetchone():
        return
    files = [path, path.with_name(f"{path.name}-journal")]
    changed = max(file.stat().st_mtime for file in files if file.exists())
    if time.time() - changed < MIGRATING:
        raise OrchestratorError(f"{path} is being made by another process")
    raise CannotKeep(half_made(path))


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
