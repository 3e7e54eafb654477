"""Where a view is kept in MLflow: a client of it, and its SQLite file, made whole or not at all.

MLflow makes a database in some forty migrations on the file itself. Killed among them, or at it twice at once, it
leaves what it can neither use nor mend. So here they are done in memory, and the outcome is copied in one transaction:
SQLite takes back what is not committed, lets one driver in at a time, and takes an empty file for a new database.
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

MIGRATING = 5.0  # seconds without a change after which nobody is at work any more on a database that is half made
LOCK_SECONDS = 20.0  # that another process may hold the database: as MLflow waits, and longer than migrations take
_PASSING = {getattr(sqlite3, f"SQLITE_{name}") for name in ("BUSY", "LOCKED", "FULL", "IOERR", "NOMEM")}
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # SQLite has a word of its own for the first alone
_MANNERS = {  # by default a client waits for minutes on a server that is away, and writes into the terminal
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


def client_of(uri: str) -> MlflowClient:
    """Return a client that is brief and silent, where the user has not said otherwise."""
    for name, value in _MANNERS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # what concerns the user is said by us
    return MlflowClient(uri)


def ensure(path: Path, *, make: bool = True) -> None:
    """See that a whole database stands at `path`; with `make`, that it can be written, and make it if there is none.

    Raises:
        CannotKeep: it was left half made
        OrchestratorError: another process is making it
        sqlite3.Error, OSError: it cannot be opened, made or written, see `may_pass`
    """
    if make:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.stat().st_size:
        raise FileNotFoundError(errno.ENOENT, "it is empty")
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a directory")
    with closing(sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE" if make else "BEGIN")  # the second driver waits here
        made = _is_made(path, connection)
        if made and make:
            _write_a_page(connection)
        elif make:
            for statement in _new_database():
                connection.execute(statement)
            connection.execute("COMMIT")


def reason(error: BaseException) -> str:
    """Return what SQLite or the system said behind an error of MLflow's, else the error itself."""
    found = _cause(error)
    return getattr(found, "strerror", None) or str(found) or type(error).__name__


def may_pass(error: BaseException) -> bool:
    """Whether an error is of a database that was locked, or of a disk that was full or failed."""
    found = _cause(error)
    code, system = getattr(found, "sqlite_errorcode", 0) & 0xFF, getattr(found, "errno", None)
    return code in _PASSING or system == errno.EIO or is_full(error)


def is_full(error: BaseException) -> bool:
    """Whether an error is of a disk or quota that is full, or of a limit on the size of files."""
    found = _cause(error)
    code, system = getattr(found, "sqlite_errorcode", 0), getattr(found, "errno", None)
    return code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_WRITE) or system in _NO_ROOM


def _write_a_page(connection: sqlite3.Connection) -> None:
    """Write into the database and take it back: a full disk is told before MLflow is imported, which takes seconds."""
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
        raise OrchestratorError(f"{path} is being made by another process")
    raise CannotKeep(
        f"{path} is only half made, as its making was interrupted, and MLflow cannot finish it. "
        "Move that file away; `python -m orchestrator.sync` then completes the view"
    )


def _new_database() -> list[str]:
    """Return the SQL of a database as MLflow makes it in a new one, in memory, which takes half the time."""
    name = f"file:{uuid.uuid4().hex}?mode=memory&cache=shared"
    with closing(sqlite3.connect(name, uri=True)) as memory, warnings.catch_warnings():  # lives while one is connected
        warnings.simplefilter("ignore")  # SQLAlchemy will pool connections to such a URI otherwise, which does as well
        client_of(f"sqlite:///{name}&uri=true").search_experiments(max_results=1)
        return list(memory.iterdump())[1:-1]  # without BEGIN and COMMIT
