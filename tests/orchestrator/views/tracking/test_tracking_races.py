"""Drivers that track one sweep at once come to share one parent run and one run a trial."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from factories import finished, make_plan, make_records, sweep_info

from orchestrator.core.records import StageRecord
from orchestrator.views.tracking import client
from orchestrator.views.tracking.run_contents import SweepView
from orchestrator.views.tracking.tracker import MlflowTracker
from orchestrator.views.tracking.view_writer import CLOSING, OPENING

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own

PLAN = make_plan(methods=("l1_unstructured",), seeds=(0, 1), rounds=1)
RECORDS = make_records(PLAN)


@pytest.fixture
def uri(tmp_path: Path, empty_database: bytes, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


def masks(key: str, name: str) -> bytes:
    return f"{name} of {key}".encode()


def drive(uri: str, warnings: list[str]) -> MlflowTracker:
    """Track the whole sweep as one driver does; the other finishes the same stages, which the store then holds once."""
    tracker = MlflowTracker(masks, uri=uri, warn=warnings.append)
    tracker.start(sweep_info(), PLAN, {})
    for record in RECORDS.values():
        tracker.record(finished(record))
    tracker.finish("finished", {"comparison/table.csv": b"a,b\n"})
    return tracker


def runs_of(uri: str) -> list[Any]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("pruning")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id]))


def assert_whole(uri: str) -> None:
    """Assert that there is one parent, and one finished run a trial below it that holds every stage."""
    runs = runs_of(uri)
    (parent,) = [run for run in runs if "pruning.trial" not in run.data.tags]
    assert parent.data.metrics["trials/finished"] == len(PLAN.trials)
    assert Counter(run.info.run_name for run in runs if run is not parent) == Counter(t.name for t in PLAN.trials)
    for run in runs:
        assert run.info.status == "FINISHED"
        if run is not parent:
            assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
            assert run.data.tags["pruning.logged"].startswith("2 ")


def test_two_drivers_that_start_at_once_share_one_parent(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both_looked = threading.Barrier(2)
    find = client.MlflowRuns._find
    looked: set[int] = set()

    def look_together(self: client.MlflowRuns, view: Any) -> None:
        find(self, view)
        if id(self) not in looked and len(looked) < 2:  # nothing is there yet, so each goes on to create a parent
            looked.add(id(self))
            both_looked.wait(60)

    monkeypatch.setattr(client.MlflowRuns, "_find", look_together)
    warnings: list[str] = []
    trackers: list[MlflowTracker] = []
    drivers = [threading.Thread(target=lambda: trackers.append(drive(uri, warnings))) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(120)

    assert [tracker.complete for tracker in trackers] == [True, True], warnings
    assert_whole(uri)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first ends first", "the second ends first"])
def test_a_driver_that_another_has_joined_settles_too(uri: str, order: tuple[int, int]) -> None:
    views = [SweepView(sweep_info(), PLAN, RECORDS) for _ in range(2)]
    drivers = [client.MlflowRuns(uri, "pruning", masks, print) for _ in views]
    for driver, view in zip(drivers, views, strict=True):
        driver.write(view, OPENING)  # the first sees no other; the second sees the first
    for which in order:
        views[which].close("FINISHED", {})
        for index in (*range(len(PLAN.trials)), CLOSING):
            drivers[which].write(views[which], index)

    assert_whole(uri)


def test_runs_that_an_older_release_doubled_are_made_one(uri: str) -> None:
    from mlflow import MlflowClient

    drive(uri, [])
    client = MlflowClient(uri)
    for run in runs_of(uri):
        tags = {key: value for key, value in run.data.tags.items() if key.startswith(("pruning", "mlflow.parent"))}
        client.create_run(run.info.experiment_id, run.info.start_time + 1, tags, run_name=run.info.run_name)
    assert len(runs_of(uri)) == 2 * (1 + len(PLAN.trials))

    resume(uri, RECORDS)

    assert_whole(uri)


def test_a_sweep_that_is_resumed_keeps_its_runs(uri: str) -> None:
    drive(uri, [])
    before = {run.info.run_id for run in runs_of(uri)}

    resume(uri, RECORDS)

    assert {run.info.run_id for run in runs_of(uri)} == before


def resume(uri: str, records: dict[str, StageRecord]) -> None:
    tracker = MlflowTracker(masks, uri=uri)
    tracker.start(sweep_info(), PLAN, records)
    tracker.finish("finished", {})
    assert tracker.complete
