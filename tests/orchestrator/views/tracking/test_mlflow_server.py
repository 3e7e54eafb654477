"""A real `mlflow server`: stopped and started in mid-sweep, away for good, and looked at in a real browser."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from browser import MISSING, Browser, browser, free_port, wait_until_up
from factories import failed, finished, make_plan, make_records, sweep_info

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.specs import Plan
from orchestrator.views.report.files import report
from orchestrator.views.tracking.tracker import MemoryTracker, MlflowTracker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),  # MLflow's own
]

PLAN = make_plan(sparsities=(0.5, 0.9), seeds=(0, 1), rounds=2)
RECORDS = make_records(PLAN)
VIEWS = ("means", "trials")


class Server:
    """An `mlflow server` on loopback over one database, that can be stopped and started."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        options = ["--backend-store-uri", f"sqlite:///{self._folder / 'server.db'}", "--port", str(self.port)]
        options += ["--artifacts-destination", str(self._folder / "artifacts"), "--workers", "1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *options],
            cwd=self._folder,
            env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        wait_until_up(f"{self.uri}/health", 120)

    def stop(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None


@pytest.fixture
def server(tmp_path: Path, empty_database: bytes, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    (tmp_path / "server.db").write_bytes(empty_database)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    found = Server(tmp_path)
    found.start()
    yield found
    found.stop()


def masks(key: str, name: str) -> bytes:
    return f"{name} of {key}".encode()


def points(uri: str) -> dict[str, dict[str, list[tuple[int, float, int]]]]:
    """Return every point of every child; fail if a trial has two runs."""
    client, runs = runs_of(uri)
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    assert len({run.info.run_name for run in children}) == len(children)
    assert {run.info.status for run in runs} == {"FINISHED"}
    return {
        run.info.run_name: {
            key: sorted((m.step, m.value, m.timestamp) for m in client.get_metric_history(run.info.run_id, key))
            for key in run.data.metrics
        }
        for run in children
    }


def runs_of(uri: str) -> tuple[Any, list[Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("pruning")
    assert experiment is not None
    return client, list(client.search_runs([experiment.experiment_id]))


def undisturbed(plan: Plan) -> dict[str, dict[str, list[tuple[int, float, int]]]]:
    tracker = MemoryTracker()
    tracker.start(sweep_info(), plan, RECORDS)
    found: dict[str, dict[str, list[tuple[int, float, int]]]] = {}
    for name, content in tracker.children.items():
        for point in content.points:
            found.setdefault(name, {}).setdefault(point.key, []).append((point.step, point.value, point.time))
    return {name: {key: sorted(values) for key, values in keys.items()} for name, keys in found.items()}


def test_a_server_stopped_and_started_in_mid_sweep_misses_nothing(
    server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    warnings: list[str] = []
    tracker = MlflowTracker(masks, uri=server.uri, warn=warnings.append, patience=60)
    tracker.start(sweep_info(), PLAN, {})
    records = list(RECORDS.values())
    for record in records[:6]:
        tracker.record(finished(record))
    time.sleep(2)
    server.stop()
    begun = time.monotonic()
    for record in records[6:12]:
        tracker.record(finished(record))
    assert time.monotonic() - begun < 0.5, "recording waits for a server that is away"
    time.sleep(3)
    server.start()
    for record in records[12:]:
        tracker.record(finished(record))
    tracker.finish("finished", {"comparison/table.csv": b"a,b\n"})

    assert tracker.complete
    assert any("is away" in text for text in warnings)
    assert capfd.readouterr() == ("", ""), "MLflow writes into the terminal"
    assert points(server.uri) == undisturbed(PLAN)
    client, runs = runs_of(server.uri)
    for run in runs:
        if "mlflow.parentRunId" in run.data.tags:
            held = {file.path for file in client.list_artifacts(run.info.run_id, "masks")}
            assert {"masks/round_1.npz", "masks/round_2.npz"} <= held


def test_a_server_that_is_away_for_good_costs_seconds_and_can_be_completed_later(server: Server) -> None:
    server.stop()
    warnings: list[str] = []
    tracker = MlflowTracker(masks, uri=server.uri, warn=warnings.append, patience=3)
    tracker.start(sweep_info(), PLAN, {})
    for record in RECORDS.values():
        tracker.record(finished(record))
    begun = time.monotonic()
    tracker.finish("finished", {})

    assert time.monotonic() - begun < 10
    assert not tracker.complete
    assert "python -m orchestrator.sync synthetic" in warnings[-1]

    server.start()
    later = MlflowTracker(masks, uri=server.uri, warn=warnings.append)
    later.start(sweep_info(), PLAN, RECORDS)
    later.finish("finished", {})
    assert later.complete
    assert points(server.uri) == undisturbed(PLAN)


def test_a_trial_that_finishes_after_all_has_no_failure(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow.store.artifact.http_artifact_repo import HttpArtifactRepository

    first, second = [trial.stages[-1] for trial in PLAN.trials[:2]]
    others = {key: record for key, record in RECORDS.items() if key not in (first, second)}
    texts = []
    for finish in ((), (first,), (second,)):
        if second in finish:  # as on a server that lets nobody delete
            monkeypatch.setattr(HttpArtifactRepository, "delete_artifacts", refuse)
        others |= {key: RECORDS[key] for key in finish}
        tracker = MlflowTracker(masks, uri=server.uri)
        tracker.start(sweep_info(), PLAN, others)
        for key in {first, second} - others.keys():
            tracker.record(failed(key))
        tracker.finish("failed", {})
        assert tracker.complete
        texts.append([failure_of(server.uri, trial.name) for trial in PLAN.trials[:2]])

    (one, two), (one_later, two_still), (_, two_later) = texts
    assert "loss is nan" in one
    assert "loss is nan" in two
    assert one_later is None
    assert two_still == two
    assert two_later == ""


def refuse(*_: object) -> None:
    raise NotImplementedError


def failure_of(uri: str, trial: str) -> Any:
    """Return what the failure.txt of a trial's run says; None where there is none."""
    client, runs = runs_of(uri)
    (run,) = [run for run in runs if run.info.run_name == trial]
    if "failure.txt" not in [file.path for file in client.list_artifacts(run.info.run_id)]:
        return None
    return Path(client.download_artifacts(run.info.run_id, "failure.txt")).read_text()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_interface_shows_the_sweep(server: Server, tmp_path: Path) -> None:
    tracker = MlflowTracker(masks, uri=server.uri)
    tracker.start(sweep_info(), PLAN, RECORDS)
    tracker.finish("finished", report(sweep_info(), PLAN, RECORDS, compare_trials(PLAN, RECORDS)))
    _, runs = runs_of(server.uri)
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]
    child = children[0]
    base = f"{server.uri}/#/experiments/{parent.info.experiment_id}/runs"

    with browser(tmp_path / "profile") as window:
        window.open(base)
        window.wait_for_text("synthetic", "9 matching runs")
        window.open(f"{base}/{parent.info.run_id}")
        window.wait_for_text("trials/finished", "summary/dense_accuracy", "Audit:", child.info.run_name)
        window.open(f"{base}/{parent.info.run_id}/artifacts/comparison/report.html")
        window.wait_for_text("report.html", "summary.csv", "comparison.json", "figures")
        window.wait_for_frame_text("8 of 8 trials finished", "random_unstructured")
        window.open(f"{base}/{child.info.run_id}")
        window.wait_for_text(
            child.info.run_name, "test/accuracy", "sparsity/overall", "schedule.sparsity", "method.name"
        )
        window.open(f"{base}/{child.info.run_id}/model-metrics")
        window.wait_for_text("curve/train", "curve/val")
        window.open(f"{base}/{child.info.run_id}/artifacts/masks/summary.svg")
        window.wait_for_text("round_1.npz", "round_2.npz", "summary.svg")
        window.open(f"{base}/{child.info.run_id}")
        window.wait_for_true("[...document.images].some(image => image.src.includes('summary') && image.naturalWidth)")
        window.open(f"{base}?compareRunsMode=CHART")
        window.wait_for_text("summary", "trials")
        groups_and_compares_without_tuning(window, base, parent, children)


def groups_and_compares_without_tuning(window: Browser, base: str, parent: Any, children: list[Any]) -> None:
    """Open the views that the parent's description links, and the page that compares the trials, as they come."""
    means, trials = (f"{base}?viewStateShareKey={parent.data.tags['pruning.sweep']}-{view}" for view in VIEWS)
    window.open(f"{base}/{parent.info.run_id}")
    window.wait_for_text("trials", "means over seeds")
    assert {means, trials} < set(window.links())

    window.open(means)
    text = window.wait_for_text(
        "synthetic: means over seeds", "Group by: method.name", "(average)", "8 matching runs", "test/accuracy"
    )
    assert sorted(line for line in text.splitlines() if line.startswith("Group: ")) == [
        f"Group: method.name: {method}, schedule.sparsity: {sparsity}"
        for method in ("l1_unstructured", "random_unstructured")
        for sparsity in (0.5, 0.9)
    ]

    window.open(f"{trials}&compareRunsMode=CHART")
    window.wait_for_text("synthetic: trials", "Parallel Coordinates", "parameters/compression")
    window.wait_for_true("document.querySelectorAll('.dimension').length === 4")  # method, sparsity; size, accuracy

    server, _, identity = base.removesuffix("/runs").partition("/#/experiments/")
    every = quote(json.dumps([run.info.run_id for run in children]))
    window.open(f"{server}/#/compare-runs?runs={every}&experiments={quote(json.dumps([identity]))}")
    text = window.wait_for_text("Comparing 8 Runs", "Parallel Coordinates Plot", "Clear All")
    chosen = text[text.index("Parameters:") : text.index("Clear All")].split()
    assert chosen == ["Parameters:", "method.name", "schedule.sparsity", "seed", "Metrics:", "test/accuracy"]
