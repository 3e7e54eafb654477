"""The view in MLflow: a parent run for the sweep, a child run a trial, each point once, in spite of interruptions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from factories import EPOCH, ROUND_STEPS, SIZES, failed, finished, make_plan, make_record, make_records, sweep_info
from tracking_cases import Writing, points, undisturbed

from orchestrator.core.events import StageEvent
from orchestrator.core.specs import Plan
from orchestrator.views.tracking import view_writer

pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own


@dataclass
class Run:
    """A run in MLflow."""

    status: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    points: Mapping[str, list[tuple[int, float, int]]]
    """Metric -> (step, value, time in milliseconds), in order."""
    files: set[str] = field(default_factory=set)


class Kept:
    """Content of MLflow's SQLite database."""

    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder / 'mlflow.db'}"

    def tracker(self) -> Writing:
        return Writing(self.uri)

    def parent(self) -> Run:
        return next(self._run(run) for run in self._runs() if "mlflow.parentRunId" not in run.data.tags)

    def children(self) -> dict[str, Run]:
        runs = [run for run in self._runs() if "mlflow.parentRunId" in run.data.tags]
        found = {run.info.run_name: self._run(run) for run in runs}
        assert len(found) == len(runs), "a trial has two runs"
        return found

    @staticmethod
    def wait_for(true: Callable[[], bool], seconds: float = 30.0) -> None:
        """Wait until the writer has come so far."""
        deadline = time.monotonic() + seconds
        while not true():
            assert time.monotonic() < deadline, "the writer has not come so far"
            time.sleep(0.05)

    def _runs(self) -> list[Any]:
        from mlflow import MlflowClient

        self._client = MlflowClient(self.uri)
        experiment = self._client.get_experiment_by_name("pruning")
        if experiment is None:
            return []
        return list(self._client.search_runs([experiment.experiment_id]))

    def _run(self, run: Any) -> Run:
        identity = run.info.run_id
        points = {
            key: sorted((m.step, m.value, m.timestamp) for m in self._client.get_metric_history(identity, key))
            for key in run.data.metrics
        }
        return Run(run.info.status, run.data.params, run.data.tags, points, set(self._files(identity)))

    def _files(self, run_id: str, folder: str | None = None) -> Iterator[str]:
        for file in self._client.list_artifacts(run_id, folder):
            if file.is_dir:
                yield from self._files(run_id, file.path)
            else:
                yield file.path


@pytest.fixture
def kept(tmp_path: Path, empty_database: bytes) -> Kept:
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    return Kept(tmp_path)


def run_sweep(kept: Kept, plan: Plan, *, without: frozenset[str] = frozenset()) -> None:
    """Track a whole sweep whose stages `without` were finished before."""
    records = make_records(plan)
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {key: records[key] for key in without})
    for key, record in records.items():
        if key not in without:
            tracker.record(StageEvent("started", key, record.started))
            tracker.record(finished(record))
    tracker.finish("finished", {"comparison/table.csv": b"a,b\n"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, empty_database: bytes) -> tuple[Run, dict[str, Run]]:
    """Parent and children of a sweep that ran undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "mlflow.db").write_bytes(empty_database)
    kept = Kept(folder)
    run_sweep(kept, make_plan())
    return kept.parent(), kept.children()


def test_a_sweep_is_one_parent_and_one_child_a_trial(whole: tuple[Run, dict[str, Run]]) -> None:
    parent, children = whole

    assert set(children) == {trial.name for trial in make_plan().trials}
    assert {run.status for run in children.values()} == {"FINISHED"}
    assert parent.status == "FINISHED"
    assert parent.tags["pruning.axes"] == "seed, method.name, schedule.sparsity"
    assert {"comparison/table.csv", "plan.json", "config.yaml", "environment.json"} <= parent.files
    assert [value for _, value, _ in parent.points["trials/finished"]] == [12]


def test_a_child_holds_every_round_and_the_whole_curve(whole: tuple[Run, dict[str, Run]]) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    records = make_records(plan)
    run = whole[1][plan.trials[0].name]
    chain = [records[key] for key in plan.trials[0].stages]
    accuracy = [(r.round, r.after["test/accuracy"], round(1000 * (r.started + r.seconds))) for r in chain]
    assert run.points["dense/test/accuracy"] == accuracy[:1]
    assert run.points["rounds/test/accuracy"] == accuracy[1:]
    assert run.points["test/accuracy"] == accuracy[-1:]
    assert [step for step, _, _ in run.points["rounds/val/accuracy_before"]] == [1, 2]
    assert [value for _, value, _ in run.points["rounds/sparsity/overall"]] == [r.sparsity for r in chain[1:]]
    assert {f"sparsity/{name}" for name in SIZES} < set(run.points)
    assert [value for _, value, _ in run.points["parameters/remaining"]] == [chain[-1].remaining_parameters]
    steps = [step for step, _, _ in run.points["curve/train/loss"]]
    assert steps == list(range(25, 300 + 2 * ROUND_STEPS + 1, 25))
    assert run.points["curve/train/loss"][0][2] == round(1000 * (EPOCH + 0.25))
    assert {"config.yaml", "masks/round_1.npz", "masks/round_2.npz"} <= run.files


def test_children_can_be_compared_column_by_column(whole: tuple[Run, dict[str, Run]]) -> None:
    runs = list(whole[1].values())
    assert len({frozenset(run.params) for run in runs}) == 1
    assert len({frozenset(run.points) for run in runs}) == 1
    assert {run.params["method.name"] for run in runs} == {"random_unstructured", "l1_unstructured"}
    assert {run.params["schedule.sparsity"] for run in runs} == {"0.5", "0.9"}
    assert {run.params["schedule.amount"] for run in runs} == {"null"}
    assert {run.tags["method.kind"] for run in runs} == {"random_unstructured", "l1_unstructured"}
    assert {run.tags["sweep"] for run in runs} == {"synthetic"}
    assert not any(name.startswith(("tracking", "store", "cluster")) for run in runs for name in run.params)


def test_secrets_are_not_shown(whole: tuple[Run, dict[str, Run]]) -> None:
    for run in [whole[0], *whole[1].values()]:
        assert "hunter2" not in repr(run)


@pytest.mark.slow
def test_a_second_run_of_a_finished_sweep_changes_nothing(kept: Kept) -> None:
    plan = make_plan(seeds=(0,))
    run_sweep(kept, plan)
    before = kept.children()

    run_sweep(kept, plan, without=frozenset(plan.stages))

    assert {name: run.points for name, run in kept.children().items()} == {k: v.points for k, v in before.items()}
    assert {run.status for run in kept.children().values()} == {"FINISHED"}


@pytest.mark.slow
def test_a_driver_that_dies_leaves_a_view_that_the_next_completes(kept: Kept) -> None:
    plan = make_plan(seeds=(0,))
    records = make_records(plan)
    half = dict(list(records.items())[: len(records) // 2])
    first = kept.tracker()
    first.start(sweep_info(), plan, {})
    for record in half.values():
        first.record(finished(record))
    expected = sum(key in half for trial in plan.trials for key in trial.stages)
    kept.wait_for(lambda: sum(stages_of(run) for run in kept.children().values()) == expected)

    run_sweep(kept, plan, without=frozenset(half))

    expected_points = {name: points(content) for name, content in undisturbed(plan, records).items()}
    assert {name: run.points for name, run in kept.children().items()} == expected_points
    assert {run.status for run in kept.children().values()} == {"FINISHED"}


def stages_of(run: Run) -> int:
    return sum(len(run.points.get(f"{prefix}steps", ())) for prefix in ("dense/", "rounds/"))


@pytest.mark.slow
def test_an_interrupted_sweep_that_went_on_looks_like_an_undisturbed_one(kept: Kept) -> None:
    plan = make_plan(seeds=(0,))
    half = frozenset(list(plan.stages)[: len(plan.stages) // 2])
    records = make_records(plan)
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {})
    for key, record in records.items():
        killed = StageEvent("killed", key, record.started + 1)
        tracker.record(finished(record) if key in half else killed)
    tracker.finish("killed", {})
    assert kept.parent().status == "KILLED"
    assert kept.parent().points == {}
    assert any("failure.txt" in run.files for run in kept.children().values())

    run_sweep(kept, plan, without=half)

    assert [value for _, value, _ in kept.parent().points["trials/finished"]] == [len(plan.trials)]
    expected = undisturbed(plan, records)
    assert kept.children().keys() == expected.keys()
    for name, run in kept.children().items():
        assert (run.status, run.points, run.params) == ("FINISHED", points(expected[name]), expected[name].params)
        assert run.files == {*expected[name].files, *expected[name].masks}
        assert "pruning.failure" not in run.tags


@pytest.mark.slow
def test_failures_are_told_where_they_happened(kept: Kept) -> None:
    plan = make_plan(methods=("l1_unstructured",), seeds=(0, 1))
    broken = plan.trials[0].stages[1]
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {})
    for trial in plan.trials[:3]:
        for key in trial.stages:
            tracker.record(failed(key) if key in plan.trials[0].stages[1:] else finished(make_record(plan, key)))
    tracker.finish("failed", {})

    runs = kept.children()
    statuses = [runs[trial.name].status for trial in plan.trials]
    assert broken == plan.trials[0].stages[1]
    assert statuses == ["FAILED", "FINISHED", "FINISHED", "KILLED"]
    failing = runs[plan.trials[0].name]
    assert failing.tags["pruning.failure"] == "loss is nan"
    assert "failure.txt" in failing.files
    assert [step for step, _, _ in failing.points["dense/test/accuracy"]] == [0]
    assert "test/accuracy" not in failing.points
    assert kept.parent().status == "FAILED"


@pytest.mark.slow
def test_what_failed_or_was_killed_can_finish_later(kept: Kept) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0, 1))
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {})
    tracker.record(finished(make_record(plan, plan.trials[0].stages[0])))
    tracker.record(failed(plan.trials[0].stages[1]))
    tracker.finish("killed", {})
    assert [kept.children()[trial.name].status for trial in plan.trials] == ["FAILED", "KILLED"]
    assert kept.parent().status == "KILLED"

    run_sweep(kept, plan, without=frozenset({plan.trials[0].stages[0]}))

    runs = kept.children()
    assert {run.status for run in runs.values()} == {"FINISHED"}
    assert all("pruning.failure" not in run.tags for run in runs.values())
    assert [step for step, _, _ in runs[plan.trials[0].name].points["rounds/test/accuracy"]] == [1, 2]


def test_stages_trained_again_replace_the_old_run(kept: Kept) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,))
    run_sweep(kept, plan)
    again = make_records(plan, start=EPOCH + 1000)

    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {})
    for record in again.values():
        tracker.record(finished(record))
    tracker.finish("finished", {})

    (run,) = kept.children().values()
    assert [time for _, _, time in run.points["rounds/test/accuracy"]] == [
        round(1000 * (record.started + record.seconds)) for record in again.values() if record.round
    ]


def test_a_retry_is_told(kept: Kept) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,), rounds=1)
    dense, pruned = plan.stages
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {})
    tracker.record(finished(make_record(plan, dense)))
    tracker.record(StageEvent("retried", pruned, EPOCH + 20, attempt=2))
    tracker.record(finished(make_record(plan, pruned)))
    tracker.finish("finished", {})

    (run,) = kept.children().values()
    assert run.status == "FINISHED"
    assert run.tags["pruning.attempts"] == "2"


def test_events_before_start_and_without_trials_do_no_harm(kept: Kept) -> None:
    plan = make_plan(seeds=(0,))
    tracker = kept.tracker()

    tracker.record(failed(next(iter(plan.stages))))
    tracker.start(sweep_info(), Plan({}, ()), {})
    tracker.finish("finished", {})

    assert kept.parent().status == "FINISHED"
    assert kept.children() == {}


def test_the_parent_has_each_point_once_though_the_sweep_failed_first_and_was_repaired_later(kept: Kept) -> None:
    plan = make_plan(methods=("l1_unstructured",), seeds=(0, 1))
    lost = plan.trials[0].stages[-1]
    report = {"comparison/metrics.json": b'{"summary/dense_accuracy": 0.5}'}
    records = make_records(plan)
    repaired = {**records, lost: make_record(plan, lost, EPOCH + 1000)}
    for status, known in (("failed", {k: r for k, r in records.items() if k != lost}), ("finished", records)):
        finish(kept, plan, known, status, report)
    expected = kept.parent().points
    assert {key: [value for _, value, _ in points] for key, points in expected.items()} == {
        "trials/finished": [4.0],
        "summary/dense_accuracy": [0.5],
    }

    finish(kept, plan, repaired, "finished", report)
    assert kept.parent().points == expected
    finish(kept, plan, repaired, "finished", {"comparison/metrics.json": b'{"summary/dense_accuracy": 0.25}'})
    last = max(kept.parent().points["summary/dense_accuracy"], key=lambda point: point[2])
    assert last[1] == 0.25, "a figure that has changed, as with another margin, is shown"


def finish(kept: Kept, plan: Plan, records: Any, status: Any, report: dict[str, bytes]) -> None:
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, records)
    for key in plan.stages.keys() - records.keys():
        tracker.record(failed(key))
    tracker.finish(status, report)
    assert tracker.complete, tracker.said


def test_a_writer_killed_while_it_told_of_a_failure_leaves_no_stale_file(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,))
    records = make_records(plan)
    last, log_batch = plan.trials[0].stages[-1], MlflowClient.log_batch

    class Killed(BaseException):
        """Exception that ends the writer's thread."""

    def log_or_die(self: MlflowClient, *batch: Any) -> None:
        if [*tmp_path.rglob("failure.txt")]:  # files are written before figures and tags
            raise Killed
        log_batch(self, *batch)

    monkeypatch.setattr(MlflowClient, "log_batch", log_or_die)
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {key: record for key, record in records.items() if key != last})
    tracker.record(failed(last))
    tracker.finish("failed", {})
    monkeypatch.undo()
    assert not tracker.complete
    assert "failure.txt" in next(iter(kept.children().values())).files

    run_sweep(kept, plan, without=frozenset(plan.stages))

    (run,) = kept.children().values()
    assert "failure.txt" not in run.files
    assert "pruning.failure" not in run.tags


@pytest.mark.parametrize("place", ["outside", "mlruns/pruning/../../..", "linked", "s3://bucket/there"])
def test_a_database_from_elsewhere_has_nothing_written_outside_of_its_own_folder(
    kept: Kept, place: str, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    (tmp_path / "outside").mkdir()
    (tmp_path / "mlruns").mkdir()
    (tmp_path / "mlruns" / "linked").symlink_to(tmp_path / "outside")
    artifacts = {"linked": f"file://{tmp_path}/mlruns/linked", "s3://bucket/there": place}
    MlflowClient(kept.uri).create_experiment("pruning", artifacts.get(place, f"file://{tmp_path}/{place}"))
    before = set(tmp_path.rglob("*"))
    tracker = kept.tracker()
    tracker.start(sweep_info(), make_plan(seeds=(0,)), {})
    tracker.finish("killed", {})

    assert not tracker.complete
    (told,) = tracker.said
    assert f"outside of {tmp_path}/mlruns; name another experiment with `tracking.experiment`" in told
    assert set(tmp_path.rglob("*")) == before


def test_a_run_whose_artifacts_lie_outside_is_refused_too(kept: Kept, tmp_path: Path) -> None:
    import sqlite3
    from contextlib import closing

    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.5,), seeds=(0,))
    run_sweep(kept, plan, without=frozenset(list(plan.stages)[:1]))
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database, database:
        database.execute("update runs set artifact_uri = ?", (f"file://{tmp_path}/outside",))
    tracker = kept.tracker()
    tracker.start(sweep_info(), plan, {})
    for record in make_records(plan, start=EPOCH + 1000).values():
        tracker.record(finished(record))
    tracker.finish("failed", {"comparison/table.csv": b"a,b\n"})

    assert not tracker.complete
    assert "outside of" in tracker.said[-1]
    assert not (tmp_path / "outside").exists()


@pytest.mark.slow
def test_the_curve_of_a_stage_that_runs_is_there_once_a_checkpoint_holds_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(methods=("l1_unstructured",), sparsities=(0.9,), seeds=(0,))
    records = make_records(plan)
    dense = records[plan.trials[0].stages[0]]
    monkeypatch.setattr(view_writer, "LOOK_EVERY", 0.05)

    def shown() -> int:
        runs = kept.children().values()
        return len(next(iter(runs)).points.get("curve/val/loss", ())) if runs else 0

    for count in (3, 5):  # a killed driver, and its successor
        tracker = Writing(kept.uri, curve=lambda key, count=count: dense.curve[: count * (key == dense.key)])
        tracker.start(sweep_info(), plan, {})
        tracker.record(StageEvent("started", dense.key, EPOCH))
        kept.wait_for(lambda count=count: shown() == count)
    for record in records.values():
        tracker.record(finished(record))
    tracker.finish("finished", {})

    (whole,), (run,) = undisturbed(plan, records).values(), kept.children().values()
    assert run.points == points(whole)
