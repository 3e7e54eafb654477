"""Runs of one sweep in MLflow: found by their tags, created, completed.

Drivers that start one sweep at the same time share its runs: one of them creates, the others search again
(`run_creation`). If they share no store, several runs can get one identity; the oldest stays and the others are
withdrawn. MLflow refuses writes to a withdrawn run, and its driver then searches again. At its end each driver checks
that every trial has one run.
"""

from __future__ import annotations

import getpass
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.config.tracking_uri import artifact_location, local_folder, sqlite_path
from orchestrator.core.errors import CannotKeep, StoreError
from orchestrator.core.file_names import MASKS
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.redact import redact, shown
from orchestrator.store.leases import Leases
from orchestrator.views.tracking import run_contents as runs_hold
from orchestrator.views.tracking import view_database
from orchestrator.views.tracking.run_contents import Content, SweepView

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


class CreatedElsewhere(Exception):
    """Another driver is creating runs of the sweep; search for them again later."""


class Creating:
    """Driver's right to create the runs of one view, as a lease in the store.

    Without leases, or if the store cannot be written, the right is always granted, and duplicate runs are withdrawn
    later.

    Args:
        leases: function that makes this driver's leases; None if no store is shared
        view: identity of the view: MLflow's address, experiment, sweep
    """

    def __init__(self, leases: Callable[[], Leases] | None, *view: str) -> None:
        self._make, self._key = leases, digest(canonical_json(["view", *view]))
        self._leases: Leases | None = None

    def take(self) -> bool:
        """Acquire or keep the right; return whether this driver has it."""
        if self._make is None:
            return True
        try:
            if self._leases is None:
                self._leases = self._make().__enter__()
            return self._leases.acquire(self._key)
        except StoreError:
            return True

    def give_back(self) -> None:
        """Release the right."""
        if self._leases is not None:
            with suppress(StoreError):
                self._leases.close()
            self._leases = None


ReadFile = Callable[[str, str], bytes]  # (stage key, file name) -> content, from the store
PARENT_TAG, USER_TAG = "mlflow.parentRunId", "mlflow.user"
SAVED_VIEW_TAG = "mlflow.sharedViewState."  # prefix of saved views among an experiment's tags
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}  # the interface then opens on runs, not traces
MODE = "workflowType=machine_learning"  # in an address: else MLflow 3.17 opens in its mode for language models
PAGE = 1000  # runs in an answer of a search
MOST_POINTS, MOST_PARAMS = 800, 100  # limits of one request to MLflow, which also has the tags


class MlflowRuns:
    """Connection to MLflow with the runs of one sweep; a new one is made after every error.

    Args:
        uri: MLflow's address
        experiment: name of the experiment
        read: reads a file of a stage from the store
        say: prints messages to the user
        claim: acquires the right to create runs; returns whether this driver has it
        alive: called after each page of found or checked runs, as a sign of life
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        read: ReadFile,
        say: Callable[[str], None],
        claim: Callable[[], bool] = lambda: True,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        database = sqlite_path(uri)
        if database is not None:
            view_database.ensure(database)
        self._folder = None if database is None else database.parent.resolve() / "mlruns"
        self._client = view_database.client_of(uri)
        self._read, self._say, self._claim, self._alive = read, say, claim, alive
        self._experiment = self._open_experiment(uri, experiment)
        self._parent: Run | None = None
        self._children: dict[str, Run] = {}
        self._statuses: dict[str, str] = {}
        self._created = False
        """Whether this driver has created a run since the last search."""
        self._creates = False
        """Whether this driver has the right to create, and has searched since it got the right."""
        self._offered = False
        """Whether the views of this sweep are saved, which needs a finished stage."""

    def open(self, view: SweepView) -> bool:
        """Ensure that the parent run exists and is running; return whether anything had to be written."""
        parent, content = self._parent or self._find(view), view.opening()
        status = self._statuses[parent.info.run_id]
        if view.outcome != "RUNNING":
            content.status = status  # it changes only after all else is written
        plan = content.tags[runs_hold.PLAN_TAG]
        if (parent.data.tags.get(runs_hold.PLAN_TAG), status) == (plan, content.status):
            return False
        self._update(parent, content)
        self._offer_views(view, parent)
        return True

    def write(self, view: SweepView, index: int) -> bool:
        """Bring the run of trial `index` up to date; return whether anything had to be written."""
        parent, identity, name = self._parent or self._find(view), view.ids[index], view.plan.trials[index].name
        run = self._children.get(identity)
        held = (run.data.tags.get(runs_hold.LOGGED_TAG, ""), self._statuses[run.info.run_id]) if run else ("", "")
        content, tags = view.content(index, *held), {PARENT_TAG: parent.info.run_id}
        if content is None:
            assert run is not None
            if run.data.tags.get(PARENT_TAG) == parent.info.run_id:
                return False
            content = Content(held[1])
        if (run is None or content.new_run) and not self._may_create():
            self._find(view)
            return self.write(view, index)
        if run and content.new_run:
            self._withdraw(run)
        if run is None or content.new_run:
            tags[runs_hold.TRIAL_TAG] = identity
            run = self._children[identity] = self._create(view, name, tags, content.start)
        for file, key in content.masks.items():
            try:
                content.files[file] = self._read(key, MASKS)
            except Exception as error:
                self._say(f"The masks of `{name}` cannot be read for MLflow: {error}")
        content.tags |= tags
        self._update(run, content)
        if not self._offered:
            self._offer_views(view, parent)
        return True

    def close(self, view: SweepView) -> bool:
        """Complete all runs, because another driver may have written too, then end the parent run; return True."""
        parent = self._find(view)
        self.open(view)
        for index in range(len(view.ids)):
            self.write(view, index)
            if index % PAGE == PAGE - 1:
                self._alive()
        content, held = view.closing(), parent.data.metrics
        content.points = [
            point._replace(time=time.time()) if point.key in held else point  # MLflow shows the latest of two points
            for point in content.points
            if held.get(point.key) != point.value
        ]
        self._update(parent, content)
        if self._created:
            self._find(view)  # another driver may have created runs of the same trials at the same moment
        return True

    def _open_experiment(self, uri: str, name: str) -> str:
        from mlflow.exceptions import MlflowException

        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                self._client.create_experiment(name, artifact_location(uri, name), EXPERIMENT_TAGS)
            except MlflowException:
                if self._client.get_experiment_by_name(name) is None:  # else another driver created it first
                    raise
            found = self._client.get_experiment_by_name(name)
        assert found is not None, name
        self._place(found.artifact_location)
        return str(found.experiment_id)

    def _offer_views(self, view: SweepView, parent: Run) -> None:
        from mlflow.exceptions import MlflowException

        views = view.saved_views(parent.info.run_id)
        self._offered = bool(views)
        with suppress(MlflowException):  # a server may allow only administrators to set these tags
            for key, state in views.items():
                self._client.set_experiment_tag(self._experiment, f"{SAVED_VIEW_TAG}{key}", state)

    def _find(self, view: SweepView) -> Run:
        """Search for the sweep's runs; return the parent run, created if there is none."""
        self._parent, self._children, self._created = None, {}, False
        for run in search(self._client, self._experiment, of_sweep(view.sweep.name), self._alive):
            identity = run.data.tags.get(runs_hold.TRIAL_TAG)
            self._statuses[run.info.run_id] = run.info.status
            if identity is None and self._parent is None:
                self._parent = run
            elif identity is not None and identity not in self._children:
                self._children[identity] = run
            else:
                self._withdraw(run)
        if self._parent is None:
            if self._may_create():
                self._create(view, view.sweep.name, {}, None)
            return self._find(view)  # another driver may have created one at the same moment
        return self._parent

    def _may_create(self) -> bool:
        """Return whether to create a missing run; False if the right is new, and the caller has to search again.

        Raises:
            CreatedElsewhere: another driver has the right
        """
        if self._creates:
            return True
        if not self._claim():
            raise CreatedElsewhere
        self._creates = True
        return False

    def settle(self) -> None:
        """Forget the right to create, because it is about to be released."""
        self._creates = False

    def _withdraw(self, run: Run) -> None:
        from mlflow.exceptions import MlflowException

        with suppress(MlflowException):  # another driver has withdrawn it
            self._client.delete_run(run.info.run_id)

    def _create(self, view: SweepView, name: str, tags: Mapping[str, str], start: float | None) -> Run:
        user = "unknown"
        with suppress(OSError, KeyError, ImportError):  # many containers have no entry in the password database
            user = getpass.getuser()
        tags = {runs_hold.SWEEP_TAG: runs_hold.sweep_tag(view.sweep.name), USER_TAG: user, **tags}
        run = self._client.create_run(self._experiment, round(1000 * (start or time.time())), tags, shown(name))
        self._statuses[run.info.run_id] = run.info.status
        self._created = True
        return run

    def _update(self, run: Run, content: Content) -> None:
        """Write files first and tags last, so that a run's tag names a stage only after all of the stage is written."""
        from mlflow.entities import Metric, Param, RunTag

        content = content.shown()
        id, held, failure = run.info.run_id, run.data, content.tags.get(runs_hold.FAILURE_TAG)
        if failure is not None:  # before its file, because the tag tells readers to look for the file
            self._client.set_tag(id, runs_hold.FAILURE_TAG, failure)
        elif runs_hold.FAILURE_TAG in held.tags:
            content.files[runs_hold.FAILURE_FILE] = b""
        self._write_files(run, content.files)
        if note := content.tags.get(runs_hold.NOTE_TAG):
            content.tags[runs_hold.NOTE_TAG] = self._linked(note, id)
        points = [Metric(key, value, round(1000 * when), step) for key, value, when, step in content.points]
        params = [Param(key, value) for key, value in content.params.items() if key not in held.params]
        tags = {key: value for key, value in content.tags.items() if held.tags.get(key) != value}
        if len(points) > MOST_POINTS or len(params) > MOST_PARAMS:
            self._client.log_batch(id, points[:-MOST_POINTS], params)
            points, params = points[-MOST_POINTS:], []
        self._client.log_batch(id, points, params, [RunTag(*tag) for tag in tags.items()])
        held.params.update(content.params)
        held.tags.update(tags)
        if failure is None and held.tags.pop(runs_hold.FAILURE_TAG, None) is not None:
            self._client.delete_tag(id, runs_hold.FAILURE_TAG)
        if content.status != runs_hold.STOPPED and held.tags.pop(runs_hold.STOPPED_TAG, None) is not None:
            self._client.delete_tag(id, runs_hold.STOPPED_TAG)
        if self._statuses[id] != content.status:
            if content.status in ("RUNNING", runs_hold.STOPPED):
                self._client.update_run(id, content.status)
            else:
                self._client.set_terminated(id, content.status, round(1000 * (content.end or time.time())))
            self._statuses[id] = content.status

    def _write_files(self, run: Run, files: Mapping[str, bytes]) -> None:
        """Write files; an empty file is deleted, or written empty if artifacts are on a server."""
        if not files:
            return
        aside = tempfile.TemporaryDirectory() if self._folder is None else nullcontext()
        with aside as folder:
            for name, data in files.items():
                path = self._place(run.info.artifact_uri, name) if folder is None else Path(folder, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data) if data or folder else path.unlink(missing_ok=True)
            if folder is not None:
                self._client.log_artifacts(run.info.run_id, folder)

    def _place(self, artifacts: str, name: str = "") -> Path:
        """Return the path of a run's file.

        Raises:
            CannotKeep: the path is outside of the folder `mlruns` next to the database, as in a copied database
        """
        folder = local_folder(artifacts) or Path("/")
        if self._folder is not None and not (folder / name).resolve().is_relative_to(self._folder):
            raise CannotKeep(
                f"it keeps artifacts in {redact(artifacts)}, outside of {self._folder}; "
                "name another experiment with `tracking.experiment` (`--experiment`)"
            )
        return folder / name

    def _linked(self, note: str, run_id: str) -> str:
        """Resolve the links and pictures of a description to saved views and this run's files in the interface."""
        experiment = f"#/experiments/{self._experiment}/runs"
        note = note.replace("](views/", f"]({experiment}?{MODE}&viewStateShareKey=")
        note = note.replace("](comparison/", f"]({experiment}/{run_id}/artifacts/comparison/")
        return note.replace("](masks/", f"](get-artifact?run_uuid={run_id}&path=masks/")


def of_sweep(name: str) -> str:
    """Return the search condition for the runs of a sweep."""
    return f"tags.`{runs_hold.SWEEP_TAG}` = '{runs_hold.sweep_tag(name)}'"


def search(
    client: MlflowClient, experiment: str, condition: str, alive: Callable[[], object] = lambda: None
) -> list[Run]:
    """Return the runs that match `condition`, oldest first, in an order that is equal for all drivers.

    Args:
        client: connection to MLflow
        experiment: id of the experiment
        condition: search condition
        alive: called after each full page
    """

    def pages() -> Iterator[Run]:
        token = None
        while token != "":
            page = client.search_runs([experiment], condition, max_results=PAGE, page_token=token)
            yield from page
            if token := page.token or "":
                alive()

    return sorted(pages(), key=lambda run: (run.info.start_time, run.info.run_id))
