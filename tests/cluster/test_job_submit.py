"""The command of a sweep, submitted to a real Ray cluster with `ray job submit`. Slow."""

from __future__ import annotations

import json
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from nodes import Nodes, nodes, ray, run

from orchestrator.core.specs import Plan
from orchestrator.store.store import Store

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs the loopback addresses 127.0.0.2 and up"),
]

MODEL = """
from torch import nn

def tiny():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
"""
SWEEP = (
    "--config-dir=conf",
    "+sweep=random_amounts",
    "schedule.sparsity=0.5,0.9",
    "schedule.rounds=1",
    "seed=0",
    "model=tiny",
    "train.epochs=1",
    "finetune.epochs=1",
    "cluster=auto",
)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Nodes]:
    pytest.importorskip("aiohttp_cors", reason="jobs need Ray's dashboard: pip install 'ray[default]'")
    with nodes() as found:
        found.head(dashboard=True)
        yield found


@pytest.fixture
def project(cluster: Nodes, tmp_path: Path) -> Path:
    """Directory of a user with a custom network that every worker must be able to import."""
    folder = tmp_path / "project"
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "tiny.yaml").write_text("_target_: own_model.tiny\n")
    (folder / "own_model.py").write_text(MODEL)
    return folder


class Jobs:
    """Submit, watch and stop jobs with `ray job`, as a user does on their own machine."""

    def __init__(self, cluster: Nodes, project: Path) -> None:
        self.cluster, self.project = cluster, project
        self.environment = {**cluster.environment, "RAY_ADDRESS": cluster.jobs}

    def __call__(self, verb: str, *arguments: str) -> tuple[int, str]:
        result = run(ray("job", verb, *arguments), self.project, self.environment)
        return result.returncode, result.stdout + result.stderr

    def submit(self, name: str, *overrides: str, wait: bool = True) -> tuple[int, str]:
        entrypoint = [sys.executable, "-m", "orchestrator", *overrides]
        options = ["--submission-id", name, "--working-dir", ".", *([] if wait else ["--no-wait"])]
        until = time.monotonic() + 120
        # The agent that takes jobs starts last.
        while "No available agent" in (answer := self("submit", *options, "--", *entrypoint))[1]:
            assert time.monotonic() < until, answer
            time.sleep(2)
        return answer

    def info(self, name: str) -> dict[str, Any]:
        request = urllib.request.Request(
            f"{self.cluster.jobs}/api/jobs/{name}", headers={"Authorization": f"Bearer {self.cluster.token}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                found: dict[str, Any] = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 404:
                raise
            return {"status": "PENDING"}  # submitted, but not yet known to Ray
        return found


@pytest.fixture
def jobs(cluster: Nodes, project: Path) -> Jobs:
    return Jobs(cluster, project)


def places(folder: Path) -> tuple[str, str]:
    return f"store.uri={folder}/store", f"tracking.uri=sqlite:///{folder}/mlflow.db"


def statuses(database: Path) -> list[str]:
    if not database.exists():
        return []
    connection = sqlite3.connect(database)
    try:
        return [status for (status,) in connection.execute("select status from runs")]
    except sqlite3.OperationalError:  # its tables are still being made
        return []
    finally:
        connection.close()


def finished(folder: Path) -> tuple[Plan, set[str]]:
    store = Store(str(folder / "store"))
    (name,) = store.sweeps()
    plan = Plan.from_json(store.load_sweep(name)["plan"])
    return plan, set(store.finished(plan.stages))


def test_a_submitted_sweep_runs_as_it_does_on_a_laptop(jobs: Jobs, tmp_path: Path) -> None:
    status, output = jobs.submit("whole", *SWEEP, *places(tmp_path))

    assert status == 0, output
    plan, done = finished(tmp_path)
    assert done == set(plan.stages)
    assert statuses(tmp_path / "mlflow.db") == ["FINISHED"] * 3
    _, log = jobs("logs", "whole")
    events = [line for line in log.splitlines() if "  finished  " in line]
    assert len(events) == len(plan.stages) == 3, log
    assert "\x1b" not in "".join(events)
    assert "2 of 2 trials done" in log
    assert "Traceback" not in log


def test_a_place_that_would_be_lost_is_refused_before_anything_starts(jobs: Jobs) -> None:
    status, output = jobs.submit("refused", *SWEEP)

    assert status != 0
    assert jobs.info("refused")["driver_exit_code"] == 2, output
    assert "`store.uri` (=store) lies in the working directory" in output
    assert "`tracking.uri` (=sqlite:///mlflow.db) lies in the working directory" in output
    assert "Traceback" not in output


def test_a_failed_trial_is_the_jobs_exit_status(jobs: Jobs, tmp_path: Path) -> None:
    status, output = jobs.submit("failing", *SWEEP, *places(tmp_path), "tracking=none", "train.optimizer.lr=1e30")

    assert status != 0
    assert jobs.info("failing")["driver_exit_code"] == 1, output
    assert "2 of 2 trials failed" in output
    assert "Traceback" not in output


def test_a_stopped_job_leaves_killed_runs_and_a_store_to_go_on_from(jobs: Jobs, tmp_path: Path) -> None:
    axes = ("schedule.rounds=100", "finetune.epochs=40")  # so long that no trial ends before the job is stopped
    jobs.submit("stopped", *SWEEP, *places(tmp_path), *axes, wait=False)
    end = time.monotonic() + 90
    while not (seen := statuses(tmp_path / "mlflow.db")) or not finished(tmp_path)[1]:
        assert jobs.info("stopped")["status"] in ("PENDING", "RUNNING"), jobs("logs", "stopped")[1]
        assert time.monotonic() < end, jobs("logs", "stopped")[1]
        time.sleep(0.5)
    assert set(seen) == {"RUNNING"}
    status, output = jobs("stop", "stopped")

    assert status == 0, output
    assert jobs.info("stopped")["status"] == "STOPPED"
    assert set(statuses(tmp_path / "mlflow.db")) == {"KILLED"}
    plan, done = finished(tmp_path)
    assert 0 < len(done) < len(plan.stages)
    _, log = jobs("logs", "stopped")
    assert "Stopping at the next batch." in log
    assert "Traceback" not in log
