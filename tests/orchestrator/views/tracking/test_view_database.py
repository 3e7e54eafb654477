"""A new MLflow database is created completely or not at all; an unusable one is reported at once."""

from __future__ import annotations

import multiprocessing
import os
import re
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from multiprocessing.context import ForkServerProcess as Process
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest
from factories import make_plan, make_records, sweep_info
from tracking_cases import Writing

from orchestrator.core.errors import CannotKeep, OrchestratorError
from orchestrator.views.tracking import view_database, view_writer

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own

PLAN = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,), rounds=1)
PROCESSES = multiprocessing.get_context("forkserver")
PRELOADED = ["pytest", "mlflow.store.tracking.sqlalchemy_store", "orchestrator.views.tracking.view_writer"]
PROCESSES.set_forkserver_preload(PRELOADED)  # imported once, not by each driver


def track(uri: str) -> list[str]:
    """Track a sweep as a driver does; return the messages to the user."""
    tracker = Writing(uri, experiment="views")
    tracker.start(sweep_info(), PLAN, make_records(PLAN))
    tracker.finish("finished", {})
    return tracker.said


def drive(folder: Path, together: Barrier) -> None:
    """Track a sweep in `folder` as a driver does, once all drivers are ready to start together."""
    os.chdir(folder)
    view_database.LOCK_SECONDS = 120.0  # on a busy machine migrations may take longer than users should wait
    together.wait(60)
    sys.exit(0 if track(f"sqlite:///{folder / 'mlflow.db'}") == [] else 1)


def drivers(folder: Path, number: int) -> list[Process]:
    """Start processes that track at the same time; return them."""
    together = PROCESSES.Barrier(number + 1)
    started = [PROCESSES.Process(target=drive, args=(folder, together)) for _ in range(number)]
    for process in started:
        process.start()
    together.wait(60)
    return started


def rows(database: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(database)) as connection:
        return connection.execute(query).fetchall()


def assert_whole(folder: Path) -> None:
    assert rows(folder / "mlflow.db", "SELECT status FROM runs WHERE lifecycle_stage = 'active'") == [("FINISHED",)] * 2
    assert rows(folder / "mlflow.db", "PRAGMA integrity_check") == [("ok",)]
    assert not [path.name for path in folder.iterdir() if path.name not in ("mlflow.db", "mlruns")]


@pytest.mark.slow
def test_a_new_database_is_what_mlflow_would_have_made(
    tmp_path: Path, empty_database: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "theirs.db").write_bytes(empty_database)
    tables = "SELECT type, name, tbl_name FROM sqlite_master ORDER BY 1, 2, 3"

    assert (said := track(f"sqlite:///{tmp_path / 'ours.db'}")) == [], said
    assert rows(tmp_path / "ours.db", tables) == rows(tmp_path / "theirs.db", tables)
    (version,) = rows(tmp_path / "theirs.db", "SELECT * FROM alembic_version")
    assert rows(tmp_path / "ours.db", "SELECT * FROM alembic_version") == [version]
    (default,) = rows(tmp_path / "ours.db", "SELECT name, artifact_location FROM experiments WHERE experiment_id = 0")
    assert default == ("Default", str(tmp_path / "mlruns" / "0"))


@pytest.mark.parametrize("wait", [0.0, 0.3, 0.8, 1.3])
@pytest.mark.slow
def test_a_driver_killed_in_making_it_leaves_nothing_in_the_way(wait: float, tmp_path: Path) -> None:
    (first,) = drivers(tmp_path, 1)
    deadline = time.monotonic() + 60
    while not (tmp_path / "mlflow.db").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    time.sleep(wait)
    first.kill()
    first.join()

    assert track(f"sqlite:///{tmp_path / 'mlflow.db'}") == []
    assert_whole(tmp_path)


@pytest.mark.slow
def test_two_drivers_at_once_in_an_empty_folder_make_one(tmp_path: Path) -> None:
    both = drivers(tmp_path, 2)
    for process in both:
        process.join(120)

    assert [process.exitcode for process in both] == [0, 0]
    assert_whole(tmp_path)


@pytest.mark.slow
def test_an_empty_file_counts_as_none_even_beside_the_journal_of_another(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    (tmp_path / "mlflow.db-journal").write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(4096))

    assert track(f"sqlite:///{tmp_path / 'mlflow.db'}") == []
    assert_whole(tmp_path)


def half_made(path: Path, *, age: float) -> Path:
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE experiments (name); CREATE TABLE _alembic_tmp_experiments (name)")
    os.utime(path, (time.time() - age, time.time() - age))
    return path


def test_a_database_that_is_half_made_is_told_at_once_with_the_remedy(tmp_path: Path) -> None:
    path = half_made(tmp_path / "mlflow.db", age=60)
    begun = time.monotonic()

    (told,) = track(f"sqlite:///{path}")

    assert time.monotonic() - begun < 10
    assert f"{path} is incomplete" in told
    assert "Move the file away; `python -m orchestrator.sync` then completes the view." in told
    with pytest.raises(CannotKeep, match="is incomplete"):
        view_database.ensure(path, make=False)


def test_a_database_that_another_process_is_making_is_waited_for(tmp_path: Path) -> None:
    path = half_made(tmp_path / "mlflow.db", age=0)

    with pytest.raises(OrchestratorError, match="is being created by another process") as raised:
        view_database.ensure(path)
    assert not isinstance(raised.value, CannotKeep)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("folder", "it is a directory"),
        ("text", "file is not a database"),
        ("text/mlflow.db", "Not a directory|File exists"),
        ("/proc/mlflow.db", "unable to open database file"),
        ("/proc/new/mlflow.db", "No such file or directory"),
    ],
)
def test_a_path_that_can_never_hold_one_is_told_at_once(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database, but a text of some length\n" * 30)
    begun = time.monotonic()

    (told,) = track(f"sqlite:///{tmp_path / name}")

    assert time.monotonic() - begun < 10
    assert "cannot be used" in told
    assert re.search(reason, told)
    assert "tracking.uri" in told


@pytest.mark.parametrize("uri", ["foo://x", "postgresql+foo://a/b", "mssql://x", "folder"])
def test_a_scheme_that_is_unknown_is_told_at_once(uri: str) -> None:
    begun = time.monotonic()

    (told,) = track(uri)

    assert time.monotonic() - begun < 10
    assert "cannot be used" in told
    assert "tracking.uri" in told


@pytest.mark.slow
def test_a_database_that_is_locked_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_database, "LOCK_SECONDS", 0.1)
    monkeypatch.setattr(view_writer, "PATIENCE", 1.0)
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        connection.execute("BEGIN EXCLUSIVE")

        told, given_up = track(f"sqlite:///{tmp_path / 'mlflow.db'}")

    assert "cannot be written now (database is locked); the store keeps all, and writing is tried again." in told
    assert "is given up" in given_up
    assert track(f"sqlite:///{tmp_path / 'mlflow.db'}") == []


FULL = """
import resource, sys, threading, time
from orchestrator.views.tracking.view_writer import Requests, ViewWriter

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
told, requests = [], Requests()
say = lambda text: told or told.append((text, "mlflow" in sys.modules))
write = ViewWriter(requests, say, print, read=lambda *_: b"", uri=sys.argv[1], experiment="pruning").write
threading.Thread(target=write, daemon=True).start()
deadline = time.monotonic() + 60
while not told and time.monotonic() < deadline:
    time.sleep(0.01)
print(told)
"""


def test_that_nothing_can_be_written_is_told_before_mlflow_is_imported(tmp_path: Path, empty_database: bytes) -> None:
    (tmp_path / "mlflow.db").write_bytes(empty_database)

    command = [sys.executable, "-c", FULL, f"sqlite:///{tmp_path / 'mlflow.db'}"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout

    assert "cannot be written now (disk I/O error); the store keeps all, and writing is tried again.', False)" in said
    assert (tmp_path / "mlflow.db").read_bytes() == empty_database


def test_an_experiment_that_cannot_be_made_is_told_with_the_cause(
    tmp_path: Path, empty_database: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    def full(*_: object) -> None:
        try:
            with closing(sqlite3.connect(":memory:")) as connection:
                connection.execute("PRAGMA max_page_count = 1")
                connection.execute("CREATE TABLE a (b)")
        except sqlite3.Error as error:
            raise MlflowException("no experiment") from error

    (tmp_path / "mlflow.db").write_bytes(empty_database)
    monkeypatch.setattr(view_writer, "FULL_PATIENCE", 0.0)
    monkeypatch.setattr(MlflowClient, "create_experiment", full)

    told, given_up = track(f"sqlite:///{tmp_path / 'mlflow.db'}")

    assert "cannot be written now (database or disk is full)" in told
    assert "is given up (database or disk is full)" in given_up


def test_a_full_database_is_told_in_a_sentence_of_ours(
    tmp_path: Path, empty_database: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sqlalchemy import event
    from sqlalchemy.engine import Engine

    def leave_no_space(connection: sqlite3.Connection, _: object) -> None:
        connection.execute("PRAGMA max_page_count = 1")

    monkeypatch.setattr(view_writer, "FULL_PATIENCE", 0.0)
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    event.listen(Engine, "connect", leave_no_space)
    try:
        told, _ = track(f"sqlite:///{tmp_path / 'mlflow.db'}")
    finally:
        event.remove(Engine, "connect", leave_no_space)

    assert told == (
        f"MLflow at sqlite:///{tmp_path / 'mlflow.db'} cannot be written now (database or disk is full); "
        "the store keeps all, and writing is tried again."
    )
