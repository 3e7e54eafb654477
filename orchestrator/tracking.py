"""Trackers: views of a sweep for people. The store is the truth; MLflow shows it.

A run is found again by its tags, and says itself which stages it holds. So after a crash, an outage or a rerun only
what is missing is written, and nothing twice.
"""

from __future__ import annotations

import getpass
import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from orchestrator.records import OrchestratorError, Plan, StageEvent, StageRecord, SweepInfo
from orchestrator.redact import redact
from orchestrator.runs import (
    COMMAND_TAG,
    FAILURE_TAG,
    LOGGED_TAG,
    NOTE_TAG,
    PLAN_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    Content,
    Status,
    SweepView,
    milliseconds,
    sweep_tag,
    trial_ids,
)
from orchestrator.saved import SavedSweep
from orchestrator.tracking_uri import artifact_location, resolve_experiment, resolve_uri, sqlite_path
from orchestrator.view_writer import CLOSING, OPENING, ViewWriter

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_LOGGER = logging.getLogger("orchestrator")
T = TypeVar("T")
ReadFile = Callable[[str, str], bytes]
"""(stage key, file name) -> content, from the store."""

STATUSES: Mapping[str, Status] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
PARENT_TAG, USER_TAG = "mlflow.parentRunId", "mlflow.user"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Makes the interface open on runs and their charts, not on traces of language models."""
MASKS_FILE = "masks.npz"
METRICS_PER_BATCH, PARAMS_PER_BATCH = 800, 100
"""With at most 100 tags these keep a batch within MLflow's 1000 entities."""
LONGEST_PARAM, LONGEST_TAG = 6000, 5000
PATIENCE = 30.0
"""Seconds without a success after which `finish` leaves the rest to `orchestrator.sync`."""

KILLED_LIMIT = 5.0
"""Seconds that an interrupted sweep waits for its view in all."""

_MANNERS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""By default a client waits for minutes on a server that is away, and writes into the terminal."""

_REFUSALS = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_STATE"}


class NoTracker:
    """Keeps no view: `tracking=none`."""

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open nothing."""

    def record(self, event: StageEvent) -> None:
        """Forget it."""

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close nothing."""


class MemoryTracker:
    """Keeps the view in memory, as each run would hold it: for tests."""

    def __init__(self) -> None:
        self.parent = Content()
        self.children: dict[str, Content] = {}
        """Trial name -> its run."""
        self._view: SweepView | None = None

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view, with what is finished already."""
        self._view = SweepView(sweep, plan, finished)
        self.parent = self._view.opening()
        self._update(self._view, range(len(plan.trials)))

    def record(self, event: StageEvent) -> None:
        """Take one event."""
        if self._view is not None:
            self._update(self._view, self._view.take(event))

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view."""
        if self._view is not None:
            self._view.close(STATUSES[status], report)
            self._update(self._view, range(len(self._view.plan.trials)))
            closing = self._view.closing()
            self.parent.status, self.parent.end, self.parent.points = closing.status, closing.end, closing.points
            self.parent.tags.update(closing.tags)
            self.parent.files.update(closing.files)

    def _update(self, view: SweepView, indices: Iterable[int]) -> None:
        for index in indices:
            content = view.content(index)
            if content is not None:
                self.children[view.plan.trials[index].name] = content


class MlflowTracker:
    """Keeps the view in MLflow: a parent run for the sweep, a child run for each trial.

    The constructor, `start` and `record` return at once: a thread imports MLflow, creates the database and writes.
    `read(stage key, file name)` fetches a stage's masks from the store.
    """

    def __init__(
        self,
        read: ReadFile,
        *,
        uri: str | None = None,
        experiment: str | None = None,
        warn: Callable[[str], None] = _LOGGER.warning,
        patience: float = PATIENCE,
    ) -> None:
        self.uri = resolve_uri(uri)
        self.experiment = resolve_experiment(experiment)
        self._warn = warn
        self._patience = patience
        self._view: SweepView | None = None
        for name, value in _MANNERS.items():
            os.environ.setdefault(name, value)
        self._writer = ViewWriter(
            connect=lambda: _MlflowRuns(self.uri, self.experiment, read, warn),
            refused=_is_refusal,
            warn=warn,
            name=f"MLflow at {redact(self.uri)}",
        )

    @property
    def complete(self) -> bool:
        """Whether MLflow holds all that was recorded; known once `finish` has returned."""
        return self._writer.complete

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view, with what is finished already."""
        self._view = SweepView(sweep, plan, finished)
        self._writer.open(self._view)

    def record(self, event: StageEvent) -> None:
        """Take one event."""
        self._writer.take(event)

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view; wait until it is written or MLflow has been away too long, then say how to complete it."""
        if self._view is not None:
            self._view.close(STATUSES[status], report)
        complete = self._writer.close(self._patience, KILLED_LIMIT if status == "killed" else math.inf)
        if self._view is not None and not complete:
            self._warn(
                f"MLflow at {redact(self.uri)} does not hold all of this sweep; the store does. "
                f"Complete it later with `python -m orchestrator.sync {self._view.sweep.name}`."
            )


@dataclass
class _Found:
    """What is known of one run in MLflow."""

    run_id: str
    status: str = "RUNNING"
    params: set[str] = field(default_factory=set)
    tags: dict[str, str] = field(default_factory=dict)


class _MlflowRuns:
    """A connection to MLflow that knows the runs of one sweep. Lives in the writer's thread."""

    def __init__(self, uri: str, experiment: str, read: ReadFile, warn: Callable[[str], None]) -> None:
        from mlflow import MlflowClient

        for name in ("mlflow", "alembic", "urllib3.connectionpool"):
            logging.getLogger(name).setLevel(logging.ERROR)  # what concerns the user is said by the writer
        if (database := sqlite_path(uri)) is not None:
            database.parent.mkdir(parents=True, exist_ok=True)
        self._client = MlflowClient(uri)
        self._experiment = self._open_experiment(uri, experiment)
        self._read = read
        self._warn = warn
        self._parent: _Found | None = None
        self._children: dict[str, _Found] = {}

    def write(self, view: SweepView, index: int) -> bool:
        """Bring the run of trial `index`, or the parent, up to date; return whether anything had to be written."""
        if self._parent is None:
            self._find(view)
        parent = self._parent
        if parent is None or index == OPENING:
            content = view.opening()
            if parent is None:
                parent = self._parent = self._create(view.sweep.name, content)
            elif parent.tags.get(PLAN_TAG) == content.tags[PLAN_TAG] and parent.status == content.status:
                return False
            self._update(parent, content)
            if index == OPENING:
                return True
        if index == CLOSING:
            self._update(parent, view.closing())
            return True
        return self._write_trial(view, index, parent)

    def _write_trial(self, view: SweepView, index: int, parent: _Found) -> bool:
        trial, identity = view.plan.trials[index], view.ids[index]
        found, content = self._children.get(identity), None
        if found is not None:
            logged = found.tags.get(LOGGED_TAG, "")
            if view.is_current(index, logged, found.status) and found.tags.get(PARENT_TAG) == parent.run_id:
                return False
            content = view.content(index, logged)
            if content is None:
                self._client.delete_run(found.run_id)
                del self._children[identity]
        if content is None:
            found, content = None, view.content(index)
        if content is None:
            return False
        content.tags |= {TRIAL_TAG: identity, PARENT_TAG: parent.run_id}
        if found is None:
            found = self._children[identity] = self._create(trial.name, content)
        for name, key in content.masks.items():
            try:
                content.files[name] = self._read(key, MASKS_FILE)
            except Exception as error:
                self._warn(f"The masks of `{trial.name}` cannot be read for MLflow: {redact(str(error))}")
        self._update(found, content)
        return True

    def _open_experiment(self, uri: str, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = artifact_location(uri, name)
        return str(self._client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))

    def _find(self, view: SweepView) -> None:
        """Find the sweep's runs again; of several with one identity the oldest counts."""
        for run in _search(self._client, self._experiment, view.id):
            found = _Found(run.info.run_id, run.info.status, set(run.data.params), dict(run.data.tags))
            identity = found.tags.get(TRIAL_TAG)
            if identity is not None:
                self._children.setdefault(identity, found)
            elif self._parent is None:
                self._parent = found

    def _create(self, name: str, content: Content) -> _Found:
        tags = {key: content.tags[key] for key in (SWEEP_TAG, TRIAL_TAG, PARENT_TAG) if key in content.tags}
        tags[USER_TAG] = _user()
        start = content.start or milliseconds(time.time())
        run = self._client.create_run(self._experiment, start_time=start, run_name=name, tags=tags)
        return _Found(run.info.run_id, tags=dict(run.data.tags))

    def _update(self, found: _Found, content: Content) -> None:
        """Write files first and tags last: a run says that it holds a stage when all of the stage is there."""
        if content.files:
            with tempfile.TemporaryDirectory() as folder:
                for name, data in content.files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                self._client.log_artifacts(found.run_id, folder)
        self._log(found, content)
        if FAILURE_TAG in found.tags and FAILURE_TAG not in content.tags:
            self._client.delete_tag(found.run_id, FAILURE_TAG)
            del found.tags[FAILURE_TAG]
        if found.status != content.status:
            if content.status == "RUNNING":
                self._client.update_run(found.run_id, status=content.status)
            else:
                self._client.set_terminated(found.run_id, status=content.status, end_time=content.end)
            found.status = content.status

    def _log(self, found: _Found, content: Content) -> None:
        from mlflow.entities import Metric, Param, RunTag

        params = {key: value[:LONGEST_PARAM] for key, value in content.params.items() if key not in found.params}
        tags = {key: value[:LONGEST_TAG] for key, value in content.tags.items()}
        if NOTE_TAG in tags:  # in the interface, links lead to this run's artifacts
            artifacts = f"](#/experiments/{self._experiment}/runs/{found.run_id}/artifacts/comparison/"
            tags[NOTE_TAG] = tags[NOTE_TAG].replace("](comparison/", artifacts)
        changed = [RunTag(key, value) for key, value in tags.items() if found.tags.get(key) != value]
        metrics = [Metric(point.key, point.value, point.time, point.step) for point in content.points]
        *param_batches, last_params = _batches([Param(key, value) for key, value in params.items()], PARAMS_PER_BATCH)
        for param_batch in param_batches:
            self._client.log_batch(found.run_id, params=param_batch)
        *metric_batches, last_metrics = _batches(metrics, METRICS_PER_BATCH)
        for metric_batch in metric_batches:
            self._client.log_batch(found.run_id, metrics=metric_batch)
        if last_metrics or last_params or changed:
            self._client.log_batch(found.run_id, metrics=last_metrics, params=last_params, tags=changed)
        found.params.update(params)
        found.tags.update(tags)


def load_from_mlflow(name: str, uri: str | None = None, experiment: str | None = None) -> SavedSweep:
    """Return a sweep as MLflow holds it: plan and configuration from the parent run, records from the children.

    Raises:
        OrchestratorError: MLflow cannot be read, or holds no such sweep
    """
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    where = f"MLflow at {redact(resolve_uri(uri))}, experiment {resolve_experiment(experiment)!r},"
    try:
        client = MlflowClient(resolve_uri(uri))
        found = client.get_experiment_by_name(resolve_experiment(experiment))
        runs = [] if found is None else _search(client, found.experiment_id, sweep_tag(name))
        parent = next((run for run in runs if TRIAL_TAG not in run.data.tags), None)
        if parent is None:
            raise OrchestratorError(f"{where} holds no sweep {name!r}; its full name is that of its parent run")
        with tempfile.TemporaryDirectory() as folder:

            def read(run_id: str, path: str) -> Any:
                return json.loads(Path(client.download_artifacts(run_id, path, folder)).read_bytes())

            plan = Plan.from_json(read(parent.info.run_id, "plan.json"))
            environment = read(parent.info.run_id, "environment.json")
            records: dict[str, StageRecord] = {}
            for run in runs:
                for file in client.list_artifacts(run.info.run_id, "records") if run is not parent else ():
                    record = StageRecord.from_json(read(run.info.run_id, file.path))
                    records.setdefault(record.key, record)
    except (MlflowException, OSError, ValueError) as error:
        raise OrchestratorError(f"{where} cannot be read: {redact(str(error))}") from error
    info = SweepInfo(name, plan.trials[0].config if plan.trials else {}, parent.data.tags[COMMAND_TAG], environment)
    reasons = {run.data.tags[TRIAL_TAG]: run.data.tags[FAILURE_TAG] for run in runs if FAILURE_TAG in run.data.tags}
    failures = {}
    for trial, identity in zip(plan.trials, trial_ids(info, plan.trials), strict=True):
        key = next((key for key in trial.stages if key not in records), None)
        if key is not None and identity in reasons:
            failures[key] = reasons[identity]
    return SavedSweep(info, plan, records, failures)


def _search(client: MlflowClient, experiment: str, sweep: str) -> list[Run]:
    """Return all runs of a sweep, the oldest first."""
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs(
            [experiment],
            filter_string=f"tags.`{SWEEP_TAG}` = '{sweep}'",
            max_results=1000,
            order_by=["attributes.start_time ASC"],
            page_token=token,
        )
        runs += page
        token = page.token
        if not token:
            return runs


def _is_refusal(error: Exception) -> bool:
    """Whether MLflow answered that it will never take this, as against being away or busy."""
    return isinstance(error, ImportError) or getattr(error, "error_code", None) in _REFUSALS


def _batches(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)] or [[]]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # no entry in the password database, as in many containers
        return "unknown"
