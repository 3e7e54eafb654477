"""MLflow client, and MLflow's SQLite file, which is created completely or not at all.

MLflow creates a database by some forty migrations on the file itself. If it is killed between them, or two processes
migrate at once, the file is left in a state that MLflow can neither use nor repair. Here the migrations run in memory,
and their result is copied in one transaction: SQLite rolls back what is not committed, admits one driver at a time,
and takes an empty file for a new database.
"""

from __future__ import annotations

import errno
import logging
import os
import sqlite3
import time
import uuid
import warnings
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.core.errors import CannotKeep, OrchestratorError

if TYPE_CHECKING:
    from mlflow import MlflowClient

MIGRATING = 5.0  # seconds without a change after which no process is still creating an incomplete database
LOCK_SECONDS = 20.0  # wait for another process's lock: as long as MLflow waits, and longer than the migrations take
_PASSING = {getattr(sqlite3, f"SQLITE_{name}") for name in ("BUSY", "LOCKED", "FULL", "IOERR", "NOMEM")}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # SQLite has an error code only for the first
_MANNERS = {  # by default a client waits minutes for a missing server, and prints to the terminal
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def client_of(uri: str) -> MlflowClient:
    """Return an MLflow client with short timeouts and no output, unless the user's environment sets these."""
    for name, value in _MANNERS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # this package reports errors to the user itself
    return MlflowClient(uri)


def ensure(path: Path, *, make: bool = True) -> None:
    """Ensure that a complete database is at `path`.

    Args:
        path: SQLite file
        make: create a missing database, and check that it can be written

    Raises:
        CannotKeep: the database is incomplete, because its creation was interrupted
        OrchestratorError: another process is creating the database
        sqlite3.Error, OSError: the database cannot be opened, created or written, see `may_pass`
    """
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.stat().st_size:
        raise FileNotFoundError(errno.ENOENT, "it is empty")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE" if make else "BEGIN")  # a second driver waits here
        made = _is_made(path, connection)
        if made and make:
            _write_a_page(connection)
        elif make:
            for statement in _new_database():
                connection.execute(statement)
            connection.execute("COMMIT")


def reason(error: BaseException) -> str:
    """Return the message of the SQLite or system error behind an MLflow error, else the error's own message."""
    found = _cause(error)
    return getattr(found, "strerror", None) or str(found) or type(error).__name__


def may_pass(error: BaseException) -> bool:
    """Whether an error may go away: a locked database, a full or failing disk."""
    found = _cause(error)
    code, system = getattr(found, "sqlite_errorcode", 0) & 0xFF, getattr(found, "errno", None)
    return code in _PASSING or system == errno.EIO or is_full(error)


def is_full(error: BaseException) -> bool:
    """Whether an error comes from a full disk or quota, or from a limit on the size of files."""
    found = _cause(error)
    code, system = getattr(found, "sqlite_errorcode", 0), getattr(found, "errno", None)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE) or system in _NO_ROOM


def _write_a_page(connection: sqlite3.Connection) -> None:
    """Write to the database and roll back: a full disk is found before MLflow is imported, which takes seconds."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    connection.execute(f"PRAGMA user_version = {int(version)}")
    connection.execute("ROLLBACK")


def _cause(error: BaseException) -> BaseException:
    found: BaseException | None = error
    while found is not None and not (isinstance(found, sqlite3.Error) or getattr(found, "strerror", None)):
        found = found.__cause__ or found.__context__
    return found or error


def _is_made(path: Path, connection: sqlite3.Connection) -> bool:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    begun = any(name.startswith("_alembic_tmp_") for name in tables)
    if not tables:
        return False
    if not begun and "experiments" in tables and connection.execute("SELECT 1 FROM experiments").fetchone():
        return True
    files = [path, path.with_name(f"{path.name}-journal")]
    if time.time() - max(file.stat().st_mtime for file in files if file.exists()) < MIGRATING:
        raise OrchestratorError(f"{path} is being created by another process")
    raise CannotKeep(
        f"{path} is incomplete, because its creation was interrupted, and MLflow cannot finish it. "
        "Move the file away; `python -m orchestrator.sync` then completes the view"
    )


def _new_database() -> list[str]:
    """Return the SQL of a new MLflow database, created in memory, which takes half the time."""
    name = f"file:{uuid.uuid4().hex}?mode=memory&cache=shared"
    with closing(sqlite3.connect(name, uri=True)) as memory, warnings.catch_warnings():  # lives while it is connected
        warnings.simplefilter("ignore")  # SQLAlchemy warns that it will pool such connections differently: no matter
        client_of(f"sqlite:///{name}&uri=true").search_experiments(max_results=1)
        return list(memory.iterdump())[1:-1]  # without BEGIN and COMMIT
