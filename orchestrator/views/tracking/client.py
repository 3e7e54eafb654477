"""The runs of one sweep in MLflow: found again, created, written, read. The only importer of mlflow.

Drivers that start one sweep at once come to share its runs: of several with one identity the oldest stays. Whoever
creates another withdraws it, and a driver that writes to a run which was withdrawn is refused and looks again.
"""

from __future__ import annotations

import getpass
import logging
import os
import sqlite3
import tempfile
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.config.tracking_uri import (
    artifact_location,
    local_folder,
    resolve_experiment,
    resolve_uri,
    sqlite_path,
)
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS
from orchestrator.core.redact import redact
from orchestrator.views.tracking import view_database
from orchestrator.views.tracking.run_contents import (
    AXES_TAG,
    FAILURE_FILE,
    FAILURE_TAG,
    LOGGED_TAG,
    NOTE_TAG,
    PLAN_TAG,
    SWEEP_TAG,
    TRIAL_TAG,
    Content,
    SweepView,
    milliseconds,
    sweep_tag,
)
from orchestrator.views.tracking.troubles import lasting_told
from orchestrator.views.tracking.view_writer import CLOSING, OPENING

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

T = TypeVar("T")
ReadFile = Callable[[str, str], bytes]
"""(stage key, file name) -> content, from the store."""

PARENT_TAG, USER_TAG = "mlflow.parentRunId", "mlflow.user"
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Makes the interface open on runs and their charts, not on traces of language models."""
JOINED_TAG = "pruning.joined"
"""Of a parent run that a driver has found in use: who created it is told so that there may be another."""
SAVED_VIEW_TAG = "mlflow.sharedViewState."
"""How the interface names a saved view among an experiment's tags."""
METRICS_PER_BATCH, PARAMS_PER_BATCH = 800, 100
"""With at most 100 tags these keep a batch within MLflow's 1000 entities."""
LONGEST_PARAM, LONGEST_TAG = 6000, 5000
PARENTS = f"tags.`{AXES_TAG}` LIKE '%'"
"""The condition that the parent runs of sweeps meet."""
WRITTEN_LAST = (LOGGED_TAG, PLAN_TAG, NOTE_TAG)
"""Tags a run is not created with: two say that all else is there, one holds links to the run."""

_MANNERS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
"""By default a client waits for minutes on a server that is away, and writes into the terminal."""


def be_brief() -> None:
    """Bound how long MLflow's client waits, and keep it out of the terminal, where the user has not said otherwise."""
    for name, value in _MANNERS.items():
        os.environ.setdefault(name, value)


@dataclass
class _Found:
    """What is known of one run in MLflow."""

    run_id: str
    folder: Path | None
    """Where its artifacts are, if in a directory of this machine."""
    status: str = "RUNNING"
    params: set[str] = field(default_factory=set)
    tags: dict[str, str] = field(default_factory=dict)


class MlflowRuns:
    """A connection to MLflow that knows the runs of one sweep. Lives in the writer's thread."""

    def __init__(self, uri: str, experiment: str, read: ReadFile, warn: Callable[[str], None]) -> None:
        with lasting_told(uri):
            if (database := sqlite_path(uri)) is not None:
                view_database.ensure(database, _new_database)
            self._client = _client(uri)
            self._experiment = self._open_experiment(uri, experiment)
        self._read = read
        self._warn = warn
        self._parent: _Found | None = None
        self._children: dict[str, _Found] = {}
        self._shared = False
        """Whether another driver may be writing this sweep too."""

    def write(self, view: SweepView, index: int) -> bool:
        """Bring the run of trial `index`, or the parent, up to date; return whether anything had to be written."""
        if self._parent is None:
            self._find(view)
        parent = self._parent
        if parent is None or index == OPENING:
            content = view.opening()
            if parent is None:
                parent = self._create_parent(view, content)
            elif parent.tags.get(PLAN_TAG) == content.tags[PLAN_TAG] and parent.status == content.status:
                return False
            self._update(parent, content)
            self._save_views(view, parent)
            if index == OPENING:
                return True
        if index == CLOSING:
            self._update(self._settle(view, parent), view.closing())
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
                self._withdraw(found)
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
                content.files[name] = self._read(key, MASKS)
            except Exception as error:
                self._warn(f"The masks of `{trial.name}` cannot be read for MLflow: {redact(str(error))}")
        self._update(found, content)
        return True

    def _open_experiment(self, uri: str, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        location = artifact_location(uri, name)
        try:
            return str(self._client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
        except MlflowException:
            found = self._client.get_experiment_by_name(name)  # another driver was faster
            if found is None:
                raise
            return str(found.experiment_id)

    def _find(self, view: SweepView) -> None:
        """Find the sweep's runs again; of several with one identity keep the oldest."""
        self._parent, self._children = None, {}
        for run in search(self._client, self._experiment, of_sweep(view.sweep.name)):
            found = _Found(
                run.info.run_id,
                local_folder(run.info.artifact_uri),
                run.info.status,
                set(run.data.params),
                dict(run.data.tags),
            )
            identity = found.tags.get(TRIAL_TAG)
            if identity is None and self._parent is None:
                self._parent = found
            elif identity is not None and identity not in self._children:
                self._children[identity] = found
            else:
                self._withdraw(found)
        if self._parent is not None and self._parent.status == "RUNNING":
            self._join(self._parent)

    def _create_parent(self, view: SweepView, content: Content) -> _Found:
        """Create the parent run, or find that another driver has done so at the same moment."""
        created = self._parent = self._create(view.sweep.name, content)
        rivals = search(self._client, self._experiment, of_sweep(view.sweep.name), PARENTS)
        if [run.info.run_id for run in rivals] != [created.run_id]:
            self._find(view)
            self._join(self._parent or created)
        return self._parent or created

    def _join(self, parent: _Found) -> None:
        """Note, also for the other driver, that this run may be in use by two."""
        self._shared = True
        if JOINED_TAG not in parent.tags:
            self._client.set_tag(parent.run_id, JOINED_TAG, "true")
            parent.tags[JOINED_TAG] = "true"

    def _withdraw(self, found: _Found) -> None:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):  # another driver has done so
            self._client.delete_run(found.run_id)

    def _settle(self, view: SweepView, parent: _Found) -> _Found:
        """Where another driver wrote too, see that every trial has one run, and all have one parent; return that."""
        if not self._shared and JOINED_TAG not in self._client.get_run(parent.run_id).data.tags:
            return parent
        self._find(view)
        parent = self._parent or self._create_parent(view, view.opening())
        for index in range(len(view.plan.trials)):
            self._write_trial(view, index, parent)
        return parent

    def _save_views(self, view: SweepView, parent: _Found) -> None:
        """Offer the sweep's views in the interface; where only an administrator may, do without."""
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):
            for key, state in view.saved_views(parent.run_id).items():
                self._client.set_experiment_tag(self._experiment, f"{SAVED_VIEW_TAG}{key}", state)

    def _create(self, name: str, content: Content) -> _Found:
        tags = {key: value for key, value in _fitting(content.tags).items() if key not in WRITTEN_LAST}
        tags[USER_TAG] = _user()
        start = content.start or milliseconds(time.time())
        run = self._client.create_run(self._experiment, start_time=start, run_name=name, tags=tags)
        return _Found(run.info.run_id, local_folder(run.info.artifact_uri), tags=dict(run.data.tags))

    def _update(self, found: _Found, content: Content) -> None:
        """Write files first and tags last: a run says that it holds a stage when all of the stage is there."""
        if found.folder is not None:  # where the client would copy them to, after it has asked the database for it
            _write_files(found.folder, content)
        elif content.files:
            with tempfile.TemporaryDirectory() as folder:
                _write_files(Path(folder), content)
                self._client.log_artifacts(found.run_id, folder)
        self._log(found, content)
        if FAILURE_TAG in found.tags and FAILURE_TAG not in content.tags:
            self._forget_failure(found)
            self._client.delete_tag(found.run_id, FAILURE_TAG)
            del found.tags[FAILURE_TAG]
        if found.status != content.status:
            if content.status == "RUNNING":
                self._client.update_run(found.run_id, status=content.status)
            else:
                self._client.set_terminated(found.run_id, status=content.status, end_time=content.end)
            found.status = content.status

    def _forget_failure(self, found: _Found) -> None:
        """Take back what was said of a run that has finished after all; empty it where artifacts cannot be deleted."""
        from mlflow.exceptions import MlflowException
        from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

        if found.folder is not None:
            (found.folder / FAILURE_FILE).unlink(missing_ok=True)
            return
        try:
            artifacts = self._client.get_run(found.run_id).info.artifact_uri
            repository: Any = get_artifact_repository(artifacts, self._client.tracking_uri)
            repository.delete_artifacts(FAILURE_FILE)
        except (MlflowException, NotImplementedError, OSError):
            self._client.log_text(found.run_id, "", FAILURE_FILE)

    def _log(self, found: _Found, content: Content) -> None:
        from mlflow.entities import Metric, Param, RunTag

        params = {key: value[:LONGEST_PARAM] for key, value in content.params.items() if key not in found.params}
        tags = _fitting(content.tags)
        if NOTE_TAG in tags:
            tags[NOTE_TAG] = self._linked(tags[NOTE_TAG], found.run_id)
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

    def _linked(self, note: str, run_id: str) -> str:
        """Return a description whose links and pictures lead, in the interface, to saved views and this run's files."""
        experiment = f"#/experiments/{self._experiment}/runs"
        return (
            note.replace("](views/", f"]({experiment}?viewStateShareKey=")
            .replace("](comparison/", f"]({experiment}/{run_id}/artifacts/comparison/")
            .replace("](masks/", f"](get-artifact?run_uuid={run_id}&path=masks/")
        )


@contextmanager
def reading(uri: str | None, experiment: str | None) -> Iterator[tuple[MlflowClient, str | None]]:
    """Give a client and the identity of the experiment, if there is one; nothing is made, and no log is printed.

    Raises:
        OrchestratorError: MLflow cannot be read, also within the block
    """
    from mlflow.exceptions import MlflowException

    uri, experiment = resolve_uri(uri), resolve_experiment(experiment)
    be_brief()
    try:
        if (database := sqlite_path(uri)) is not None:
            view_database.require(database)
        client = _client(uri)
        found = client.get_experiment_by_name(experiment)
        yield client, None if found is None else str(found.experiment_id)
    except OrchestratorError:
        raise
    except (MlflowException, sqlite3.Error, ImportError, OSError, ValueError) as error:
        where = f"MLflow at {redact(uri)}, experiment {experiment!r},"
        raise OrchestratorError(f"{where} cannot be read: {redact(str(error))}") from error


def _client(uri: str) -> MlflowClient:
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic", "urllib3.connectionpool"):
        logging.getLogger(name).setLevel(logging.ERROR)  # what concerns the user is said by us
    return MlflowClient(uri)


def _new_database() -> Iterator[str]:
    """Yield the SQL of a database as MLflow makes it in a new file; it is made in memory, which takes half the time."""
    from mlflow.store.tracking import DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    name = f"file:{uuid.uuid4().hex}?mode=memory&cache=shared"
    with closing(sqlite3.connect(name, uri=True)) as memory, warnings.catch_warnings():  # lives while one is connected
        warnings.simplefilter("ignore")  # SQLAlchemy will pool connections to such a URI otherwise, which does as well
        make: Callable[..., Any] = SqlAlchemyStore
        make(f"sqlite:///{name}&uri=true", DEFAULT_LOCAL_FILE_AND_ARTIFACT_PATH).engine.dispose()
        statements = list(memory.iterdump())
    yield from statements[1:-1]  # without BEGIN and COMMIT


def of_sweep(name: str) -> str:
    """Return the condition that the runs of a sweep meet."""
    return f"tags.`{SWEEP_TAG}` = '{sweep_tag(name)}'"


def search(client: MlflowClient, experiment: str, *conditions: str) -> list[Run]:
    """Return the runs that meet all `conditions`, the oldest first, in an order that is everyone's."""

    def pages() -> Iterator[Run]:
        token = None
        while True:
            page = client.search_runs(
                [experiment],
                filter_string=" AND ".join(conditions),
                max_results=1000,
                page_token=token,
            )
            yield from page
            token = page.token
            if not token:
                return

    return sorted(pages(), key=lambda run: (run.info.start_time, run.info.run_id))


def _write_files(folder: Path, content: Content) -> None:
    for name, data in content.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _fitting(tags: dict[str, str]) -> dict[str, str]:
    return {key: value[:LONGEST_TAG] for key, value in tags.items()}


def _batches(items: list[T], size: int) -> list[list[T]]:
    return [items[start : start + size] for start in range(0, len(items), size)] or [[]]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError, ImportError):  # no entry in the password database, as in many containers
        return "unknown"
