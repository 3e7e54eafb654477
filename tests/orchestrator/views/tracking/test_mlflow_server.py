"""A real `mlflow server`: stopped and started during a sweep, away for good, and shown in a real browser."""

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
from tracking_cases import Writing, undisturbed
from tracking_cases import points as points_of

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.views.report.report_files import report
from orchestrator.views.tracking import view_writer
from orchestrator.views.tracking.runs import MODE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning"),  # MLflow's own
]

PLAN = make_plan(sparsities=(0.5, 0.9), seeds=(0, 1), rounds=2)
RECORDS = make_records(PLAN)
VIEWS = ("means", "trials")
PICTURES = os.environ.get("PICTURES")
"""Folder for the picture in README: PICTURES=docs/images renews it."""


COLUMNS = """
    const found = [...document.querySelectorAll('.ag-header-viewport .ag-header-cell[col-id]')];
    found.sort((one, other) => one.getBoundingClientRect().left - other.getBoundingClientRect().left);
    return found.map(each => each.innerText.trim())
"""


class Server:
    """MLflow server on loopback with one database, which can be stopped and started."""

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
    found = Server(tmp_path)
    found.start()
    yield found
    found.stop()


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


def expected() -> dict[str, dict[str, list[tuple[int, float, int]]]]:
    return {name: points_of(content) for name, content in undisturbed(PLAN, RECORDS).items()}


def test_a_server_stopped_and_started_in_mid_sweep_misses_nothing(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_writer, "PATIENCE", 60.0)
    tracker = Writing(server.uri)
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
    assert any("cannot be written now" in text for text in tracker.said)
    assert capfd.readouterr() == ("", ""), "MLflow writes into the terminal"
    assert points(server.uri) == expected()
    client, runs = runs_of(server.uri)
    for run in runs:
        if "mlflow.parentRunId" in run.data.tags:
            held = {file.path for file in client.list_artifacts(run.info.run_id, "masks")}
            assert {"masks/round_1.npz", "masks/round_2.npz"} <= held


def test_a_server_that_is_away_for_good_costs_seconds_and_can_be_completed_later(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_writer, "PATIENCE", 3.0)
    server.stop()
    tracker = Writing(server.uri)
    tracker.start(sweep_info(), PLAN, {})
    for record in RECORDS.values():
        tracker.record(finished(record))
    begun = time.monotonic()
    tracker.finish("finished", {})

    assert time.monotonic() - begun < 10
    assert not tracker.complete
    assert "Connection refused" in tracker.said[0]

    server.start()
    later = Writing(server.uri)
    later.start(sweep_info(), PLAN, RECORDS)
    later.finish("finished", {})
    assert later.complete
    assert points(server.uri) == expected()


def test_a_trial_that_finishes_after_all_has_no_failure(server: Server) -> None:
    last = PLAN.trials[0].stages[-1]
    others = {key: record for key, record in RECORDS.items() if key != last}
    texts = []
    for records in (others, RECORDS):
        tracker = Writing(server.uri)
        tracker.start(sweep_info(), PLAN, records)
        if last not in records:
            tracker.record(failed(last))
        tracker.finish("failed", {})
        assert tracker.complete
        texts.append(failure_of(server.uri, PLAN.trials[0].name))

    assert "loss is nan" in texts[0]
    assert texts[1] == "", "MLflow's client can delete nothing"


def failure_of(uri: str, trial: str) -> Any:
    """Return the content of failure.txt in a trial's run; None if there is none."""
    client, runs = runs_of(uri)
    (run,) = [run for run in runs if run.info.run_name == trial]
    if "failure.txt" not in [file.path for file in client.list_artifacts(run.info.run_id)]:
        return None
    return Path(client.download_artifacts(run.info.run_id, "failure.txt")).read_text()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_interface_shows_the_sweep(server: Server, tmp_path: Path) -> None:
    tracker = Writing(server.uri)
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
        shows_the_columns_to_compare_trials_by(window, base, parent, Path(PICTURES or tmp_path) / "mlflow.png")


def shows_the_columns_to_compare_trials_by(window: Browser, base: str, parent: Any, picture: Path) -> None:
    """Open the trials as the parent's description links them, in a browser that never saw MLflow; take the picture."""
    window.script("localStorage.clear(); return true")
    window.open(f"{base}/{parent.info.run_id}?{MODE}")
    window.wait_for_text("summary/best_matching_sparsity", "difference/l1_unstructured/0.9", "means over seeds")
    (trials,) = [link for link in window.links() if link.endswith("-trials")]
    window.open("about:blank")
    window.open(trials)
    text = window.wait_for_text("synthetic: trials", "8 matching runs", "difference/test/accuracy")
    assert "Playground" not in text, "MLflow is in its mode for language-model applications"
    window.resize(1900, 760)
    window.wait_for_text("parameters/compression")  # columns out of view are not on the page
    assert window.script(COLUMNS)[:7] == [
        *("method.name", "schedule.sparsity", "seed", "test/accuracy", "difference/test/accuracy"),
        *("sparsity/overall", "parameters/compression"),
    ]
    window.screenshot(picture)


def groups_and_compares_without_tuning(window: Browser, base: str, parent: Any, children: list[Any]) -> None:
    """Open the views that the parent's description links, and the page that compares the trials."""
    means, trials = (f"{base}?{MODE}&viewStateShareKey={parent.data.tags['pruning.sweep']}-{view}" for view in VIEWS)
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
