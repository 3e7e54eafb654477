"""Drivers that track one sweep at the same time share one parent run and one run a trial."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_plan, make_records, sweep_info
from tracking_cases import Writing, masks, track

from orchestrator.core.errors import StoreError
from orchestrator.store.leases import Leases
from orchestrator.store.store import Store
from orchestrator.views.tracking import runs
from orchestrator.views.tracking.run_contents import SweepView
from orchestrator.views.tracking.runs import Creating, MlflowRuns

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own

PLAN = make_plan(methods=("l1_unstructured",), seeds=(0, 1), rounds=1)
RECORDS = make_records(PLAN)


@pytest.fixture
def uri(tmp_path: Path, empty_database: bytes) -> str:
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


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
    from mlflow import MlflowClient

    both_looked = threading.Barrier(2)
    create = MlflowClient.create_run

    def create_together(self: MlflowClient, experiment: str, start: int, tags: Any, name: str) -> Any:
        if "mlflow.parentRunId" not in tags:  # there is no run yet, so each goes on to create a parent
            both_looked.wait(60)
        return create(self, experiment, start, tags, name)

    monkeypatch.setattr(MlflowClient, "create_run", create_together)
    trackers: list[Writing] = []
    drivers = [threading.Thread(target=lambda: trackers.append(track(uri, PLAN, RECORDS))) for _ in range(2)]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(120)

    assert [tracker.complete for tracker in trackers] == [True, True], [tracker.said for tracker in trackers]
    assert_whole(uri)


def all_runs_of(uri: str) -> list[Any]:
    """Return all runs, including deleted ones."""
    from mlflow import MlflowClient
    from mlflow.entities import ViewType

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("pruning")
    assert experiment is not None
    return list(client.search_runs([experiment.experiment_id], run_view_type=ViewType.ALL))


def test_drivers_that_share_a_store_create_no_run_in_vain(
    uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both_looked, looked, search = threading.Barrier(2), set[int](), runs.search

    def search_together(*arguments: Any) -> Any:
        found = search(*arguments)
        if threading.get_ident() not in looked:  # there is no run yet, for either driver
            looked.add(threading.get_ident())
            both_looked.wait(60)
        return found

    monkeypatch.setattr(runs, "search", search_together)
    store, trackers = Store(str(tmp_path / "store")), list[Writing]()
    drivers = [
        threading.Thread(target=lambda: trackers.append(track(uri, PLAN, RECORDS, leases=store.leases)))
        for _ in range(2)
    ]
    for driver in drivers:
        driver.start()
    for driver in drivers:
        driver.join(120)

    assert [tracker.complete for tracker in trackers] == [True, True], [tracker.said for tracker in trackers]
    assert len(all_runs_of(uri)) == 1 + len(PLAN.trials)
    assert_whole(uri)
    assert store.backend.names("leases/stages") == store.backend.names("leases/owners") == []


def test_where_the_store_takes_no_lease_every_driver_may_create() -> None:
    def read_only() -> Leases:
        raise StoreError("the store is read-only")

    assert all(Creating(leases, "address", "experiment", "sweep").take() for leases in (read_only, None))


def test_a_driver_shows_that_it_is_alive_after_each_page_of_runs(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "PAGE", 1)
    track(uri, PLAN, RECORDS)
    view, shown = SweepView(sweep_info(), PLAN, RECORDS), list[int]()
    driver = MlflowRuns(uri, "pruning", masks, print, alive=lambda: shown.append(0))
    view.close("finished", {})

    driver.close(view)

    found = len(PLAN.trials) + 1
    assert len(shown) >= found - 1 + len(PLAN.trials)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["the first ends first", "the second ends first"])
def test_drivers_that_both_write_settle_on_one_run_a_trial(uri: str, order: tuple[int, int]) -> None:
    views = [SweepView(sweep_info(), PLAN, RECORDS) for _ in range(2)]
    drivers = [MlflowRuns(uri, "pruning", masks, print) for _ in views]
    for driver, view in zip(drivers, views, strict=True):
        driver.open(view)
    for driver, view in zip(drivers, views, strict=True):
        driver.write(view, 0)  # each knows of no other run of the trial, and creates one
    for which in order:
        views[which].close("finished", {})
        drivers[which].close(views[which])

    assert_whole(uri)


@pytest.mark.slow
def test_drivers_that_both_create_runs_as_they_end_settle_on_one_a_trial(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    track(uri, PLAN, {key: replace(record, started=record.started - 100) for key, record in RECORDS.items()})
    views = [SweepView(sweep_info(), PLAN, RECORDS) for _ in range(2)]  # other executions, so new runs replace these
    one, other = (MlflowRuns(uri, "pruning", masks, print) for _ in views)
    create = MlflowClient.create_run

    def create_later(self: MlflowClient, *arguments: Any) -> Any:
        monkeypatch.setattr(MlflowClient, "create_run", create)
        other.close(views[1])  # finds no run of the trial, and creates one
        return create(self, *arguments)

    for view in views:
        view.close("finished", {})
    monkeypatch.setattr(MlflowClient, "create_run", create_later)
    one.close(views[0])

    assert_whole(uri)


def test_runs_that_an_older_release_doubled_are_made_one(uri: str) -> None:
    from mlflow import MlflowClient

    track(uri, PLAN, RECORDS)
    client = MlflowClient(uri)
    for run in runs_of(uri):
        tags = {key: value for key, value in run.data.tags.items() if key.startswith(("pruning", "mlflow.parent"))}
        client.create_run(run.info.experiment_id, run.info.start_time + 1, tags, run_name=run.info.run_name)
    assert len(runs_of(uri)) == 2 * (1 + len(PLAN.trials))

    assert track(uri, PLAN, RECORDS, before=RECORDS).complete
    assert_whole(uri)


def test_a_sweep_that_is_resumed_keeps_its_runs(uri: str) -> None:
    track(uri, PLAN, RECORDS)
    before = {run.info.run_id for run in runs_of(uri)}

    assert track(uri, PLAN, RECORDS, before=RECORDS).complete
    assert {run.info.run_id for run in runs_of(uri)} == before
