"""MLflow client, and MLflow's SQLite file, which is created completely or not at all.

MLflow creates a database by some forty migrations on the file itself. If it is killed between them, or two processes
migrate at once, the file is left in a state that MLflow can neither use nor repair. Here the migrations run in memory,
and their result is copied in one transaction: SQLite rolls back what is not committed, admits one driver at a time,
and takes an empty file for a new database.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import sqlite3
import time
import uuid
import warnings
from collections.abc import Container, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import CannotKeep, OrchestratorError
from orchestrator.core.metrics import Metric

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


COMPRESSION = "parameters/compression"
CHOSEN = ("method.name", "schedule.sparsity")
"""Settings that are always columns, though a sweep has one value of them."""
MIN_WIDTH = 12  # characters of a column
MOST_AXES = 6
"""Maximum number of axes shown: a tag holds 5000 characters, and a parallel plot of more axes cannot be read."""


def links(axes: Sequence[str]) -> dict[str, str]:
    """Return the views of a sweep with these axes: end of the key -> label."""
    averaged = 0 < len(_points(axes)) < len(axes)
    return ({"trials": "trials"} if axes else {}) | ({"means": "means over seeds"} if averaged else {})


def saved_views(
    sweep: str, identity: str, parent: str, axes: Sequence[str], everywhere: Container[str], metric: Metric
) -> dict[str, str]:
    """Return the views of the trials below the run `parent`: key -> value of its tag.

    Args:
        sweep: name of the sweep
        identity: tag of the sweep's runs, the beginning of the keys
        parent: ID of the parent run
        axes: axes of the sweep
        everywhere: axes that every trial has; a parallel plot leaves out trials that lack one of its axes
        metric: primary metric
    """
    now, views = round(1000 * time.time()), {}
    for view, label in links(axes).items():
        state = _state(parent, axes, metric, means=view == "means")
        if view == "trials":
            shown = [name for name in _points(axes) if name in everywhere][:MOST_AXES]
            parallel = _chart("PARALLEL", selectedParams=shown, selectedMetrics=[COMPRESSION, f"test/{metric.name}"])
            state["compareRunCharts"].append(parallel)
        envelope = {"name": f"{sweep}: {label}", "createdAt": now, "updatedAt": now, "state": json.dumps(state)}
        views[f"{identity}-{view}"] = json.dumps(envelope)
    return views


def _state(parent: str, axes: Sequence[str], metric: Metric, *, means: bool) -> dict[str, Any]:
    params = list(dict.fromkeys([*CHOSEN, *(_points(axes) if means else axes)[:MOST_AXES]]))
    grouping = [{"mode": "param", "groupByData": name} for name in _points(axes)]
    test = f"test/{metric.name}"
    metrics = (test, f"difference/{test}", "sparsity/overall", COMPRESSION, "macs/speedup")
    columns = [*(f"params.`{name}`" for name in params), *(f"metrics.`{name}`" for name in metrics)]
    x, y = ({"key": name, "type": "METRIC"} for name in (COMPRESSION, test))
    finished = " AND attributes.status = 'FINISHED'" if means else ""
    return {
        "searchFilter": f"tags.`mlflow.parentRunId` = '{parent}'{finished}",
        "orderByKey": f"metrics.`{test}`",
        "orderByAsc": metric.better == "lower",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {column: 8 * max(len(column) - len("metrics.``"), MIN_WIDTH) for column in columns},
        "groupBy": {"aggregateFunction": "average", "groupByKeys": grouping} if means else None,
        "runsHiddenMode": "SHOW_ALL",
        "isAccordionReordered": True,
        "compareRunSections": [{"uuid": "sweep", "name": "Sweep", "display": True, "isReordered": False}],
        "compareRunCharts": [_chart("SCATTER", xaxis=x, yaxis=y)],
    }


def _points(axes: Sequence[str]) -> list[str]:
    """Return the axes that distinguish operating points: all but seeds."""
    return [name for name in axes if not name.endswith("seed")]


def _chart(kind: str, **settings: object) -> dict[str, object]:
    common = {"uuid": kind.lower(), "metricSectionId": "sweep", "runsCountToCompare": 100, "showAllRuns": True}
    return {"type": kind, **common, "deleted": False, "isGenerated": False, **settings}
