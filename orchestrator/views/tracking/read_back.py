"""Listing and loading of sweeps from MLflow, without the store."""

from __future__ import annotations

import json
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.config.tracking_uri import resolve_experiment, resolve_uri, sqlite_path
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Decision, SweepInfo
from orchestrator.core.plain_data import read_as
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact
from orchestrator.core.specs import Plan
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.views.tracking import view_database
from orchestrator.views.tracking.run_contents import (
    AXES_TAG,
    COMMAND_TAG,
    FAILURE_TAG,
    SEARCH_FILE,
    TRIAL_TAG,
    trial_ids,
)
from orchestrator.views.tracking.runs import of_sweep, search

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


def load_from_mlflow(name: str, uri: str | None = None, experiment: str | None = None) -> SavedSweep:
    """Load a sweep from MLflow: plan and configuration from the parent run, records from its child runs.

    Raises:
        OrchestratorError: MLflow cannot be read, or does not hold the sweep
    """
    with _reading(uri, experiment, of_sweep(name)) as (client, runs), tempfile.TemporaryDirectory() as folder:
        parent = next((run for run in runs if TRIAL_TAG not in run.data.tags), None)
        if parent is None:
            where = f"MLflow at {redact(resolve_uri(uri))}, experiment {resolve_experiment(experiment)!r},"
            raise OrchestratorError(f"{where} holds no sweep {name!r}")

        def read(run_id: str, path: str) -> Any:
            return json.loads(Path(client.download_artifacts(run_id, path, folder)).read_bytes())

        plan = Plan.from_json(read(parent.info.run_id, "plan.json"))
        environment = read(parent.info.run_id, "environment.json")
        files = [file.path for file in client.list_artifacts(parent.info.run_id)]
        search = read_as(Decision, read(parent.info.run_id, SEARCH_FILE)) if SEARCH_FILE in files else None
        records: dict[str, StageRecord] = {}
        for run in runs:
            for file in client.list_artifacts(run.info.run_id, "records") if run is not parent else ():
                record = StageRecord.from_json(read(run.info.run_id, file.path))
                records.setdefault(record.key, record)
    info = SweepInfo(name, plan.trials[0].config if plan.trials else {}, parent.data.tags[COMMAND_TAG], environment)
    reasons = {run.data.tags[TRIAL_TAG]: run.data.tags[FAILURE_TAG] for run in runs if FAILURE_TAG in run.data.tags}
    failures = {
        next(key for key in keys if key not in records): reasons[identity]
        for keys, identity in zip(plan.work, trial_ids(info, plan.trials), strict=True)
        if identity in reasons and not records.keys() >= {*keys}
    }
    return SavedSweep(info, plan, records, failures, search)


def sweeps_in_mlflow(uri: str | None = None, experiment: str | None = None) -> list[str]:
    """Return the names of the sweeps that MLflow holds, sorted.

    Raises:
        OrchestratorError: MLflow cannot be read
    """
    with _reading(uri, experiment, f"tags.`{AXES_TAG}` LIKE '%'") as (_, parents):
        return sorted({run.data.tags["sweep"] for run in parents})


@contextmanager
def _reading(uri: str | None, experiment: str | None, condition: str) -> Iterator[tuple[MlflowClient, list[Run]]]:
    """Give a client and the runs that match `condition`, without creating anything.

    Raises:
        OrchestratorError: MLflow cannot be read, here or in the body of the `with` statement
    """
    from mlflow.exceptions import MlflowException

    uri, experiment = resolve_uri(uri), resolve_experiment(experiment)
    try:
        if (database := sqlite_path(uri)) is not None:
            view_database.ensure(database, make=False)
        client = view_database.client_of(uri)
        found = client.get_experiment_by_name(experiment)
        yield client, [] if found is None else search(client, found.experiment_id, condition)
    except (MlflowException, sqlite3.Error, ImportError, OSError, ValueError) as error:
        reason = redact(view_database.reason(error))
        raise OrchestratorError(f"MLflow at {redact(uri)} cannot be read: {reason}") from error
