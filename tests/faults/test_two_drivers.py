"""Two drivers on one store: no stage is trained twice, and each shows the whole sweep."""

from __future__ import annotations

import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from fault_commands import SWEEP, Command, finished_stages, results_of, trainings

Start = Callable[..., Command]
INLINE = ("cluster=inline", "tracking=none", "finetune.epochs=20")
"""Sweep with stages of about half a second, long enough for two drivers to meet at one."""


def table(text: str) -> list[str]:
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("sparsity %"))
    return lines[start : lines.index("", start)]


@pytest.mark.slow
def test_two_drivers_share_the_work_and_the_result(start: Start, tmp_path: Path) -> None:
    store = f"store.uri={tmp_path / 'one' / 'store'}"
    one = start(tmp_path / "one", *SWEEP, *INLINE, store)
    two = start(tmp_path / "two", *SWEEP, *INLINE, store)

    assert (one.wait(), two.wait()) == (0, 0), one.stderr + two.stderr
    assert trainings(tmp_path / "one", tmp_path / "two") == 10, "each stage was begun once"
    assert table(one.stdout) == table(two.stdout)


@pytest.mark.slow
def test_sweeps_that_share_stages_train_them_once(start: Start, tmp_path: Path) -> None:
    # One driver runs dense and two rounds as one segment; the other has a trial that ends after round one.
    store, base = f"store.uri={tmp_path / 'one' / 'store'}", [*SWEEP[:1], *SWEEP[4:], *INLINE]
    one = start(tmp_path / "one", *base, store, "seed=0", "schedule.sparsity=0.75", "schedule.rounds=2")
    two = start(tmp_path / "two", *base, store, "seed=0", "schedule.sparsity=0.5,0.9", "schedule.rounds=1")

    assert (one.wait(), two.wait()) == (0, 0), one.stderr + two.stderr
    assert trainings(tmp_path / "one", tmp_path / "two") == 4


@pytest.mark.slow
def test_what_a_dead_driver_held_is_taken_over(start: Start, tmp_path: Path, undisturbed: Path) -> None:
    store = f"store.uri={tmp_path / 'one' / 'store'}"
    one = start(tmp_path / "one", *SWEEP, "cluster=inline", "tracking=none", store)
    one.until_stages(3)
    two = start(tmp_path / "two", *SWEEP, "cluster=inline", "tracking=none", store)
    one.send(signal.SIGKILL)

    assert two.wait() == 0, two.stderr
    assert finished_stages(tmp_path / "one") == 10
    assert trainings(tmp_path / "one", tmp_path / "two") <= 11, "the one stage that was lost, once more"
    assert results_of(tmp_path / "one") == results_of(undisturbed)


@pytest.mark.slow  # a new MLflow database takes long to make
def test_two_drivers_create_no_run_in_vain(start: Start, tmp_path: Path) -> None:
    uri = f"tracking.uri=sqlite:///{tmp_path / 'mlflow.db'}"
    shared = (*SWEEP, "cluster=inline", f"store.uri={tmp_path / 'one' / 'store'}", uri)
    assert start(tmp_path / "before", *SWEEP, "cluster=inline", uri, "seed=7").wait(240) == 0, "the database is there"
    one, two = (start(tmp_path / name, *shared, "name=both") for name in ("one", "two"))

    assert (one.wait(240), two.wait(240)) == (0, 0), one.stderr + two.stderr
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as connection:
        stages = connection.execute("select lifecycle_stage, count(*) from runs group by lifecycle_stage").fetchall()
    assert stages == [("active", (1 + 4) + (1 + 2))]
