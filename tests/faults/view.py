"""Read the runs of the only sweep in an MLflow database, without MLflow."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlparse

from fault_commands import plan_of, records_of


@dataclass
class Run:
    """A run: its tags, its metric points (key, step) -> values, and its artifacts."""

    status: str
    tags: dict[str, str] = field(default_factory=dict)
    points: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    artifacts: frozenset[str] = frozenset()


def runs_in(database: Path, artifacts: Path | None = None, experiment: str = "pruning") -> list[Run]:
    """Return every run that is not deleted; `artifacts` is the folder that a server serves as mlflow-artifacts."""
    found: dict[str, Run] = {}
    with closing(sqlite3.connect(database)) as connection:
        for name, status, uri in connection.execute(
            "select run_uuid, status, artifact_uri from runs join experiments using (experiment_id) "
            "where runs.lifecycle_stage = 'active' and experiments.name = ?",
            (experiment,),
        ):
            path = Path(unquote(urlparse(uri).path))
            folder = artifacts / str(path).lstrip("/") if artifacts else path
            files = (str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
            found[name] = Run(status, artifacts=frozenset(files))
        for name, key, value in connection.execute("select run_uuid, key, value from tags"):
            if name in found:
                found[name].tags[key] = value
        for name, key, step, value in connection.execute("select run_uuid, key, step, value from metrics"):
            if name in found:
                found[name].points.setdefault((key, step), []).append(value)
    return list(found.values())


def assert_complete(folder: Path, runs: list[Run]) -> None:
    """Assert that the database has the runs of the finished sweep in `folder`: none is missing, none is doubled."""
    plan, records = plan_of(folder), records_of(folder)
    children = [run for run in runs if "mlflow.parentRunId" in run.tags]
    assert len(runs) == len(children) + 1, "one parent"
    assert {run.status for run in runs} == {"FINISHED"}
    by_name = {run.tags["mlflow.runName"]: run for run in children}
    assert sorted(by_name) == sorted(trial.name for trial in plan.trials), "one run a trial"
    assert not any("failure.txt" in run.artifacts for run in runs), "nothing stale"
    doubled = [(name, point) for name, run in by_name.items() for point, values in run.points.items() if values[1:]]
    assert not doubled
    for trial in plan.trials:
        run = by_name[trial.name]
        chain = [records[key] for key in trial.stages]
        for record in chain:
            rounds = ["rounds/"] * (len(chain) > 2) + [""] * (record is chain[-1])
            for prefix in rounds if record.round else ["dense/"]:
                assert run.points[f"{prefix}test/accuracy", record.round] == [record.after["test/accuracy"]]
                assert run.points[f"{prefix}sparsity/overall", record.round] == [record.sparsity]
        curves = sum(len(record.curve) for record in chain)
        assert sum(key == "curve/val/loss" for key, _ in run.points) == curves
        assert {f"masks/round_{record.round}.npz" for record in chain[1:]} <= run.artifacts
    (parent,) = [run for run in runs if run not in children]
    assert all(len(values) == 1 for values in parent.points.values()), "every point of the parent once"
    assert parent.points["trials/finished", 0] == [len(plan.trials)]
    assert "comparison/report.html" in parent.artifacts
