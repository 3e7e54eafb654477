"""Trackers: views of a sweep for people. The store is the truth; MLflow shows it.

A run is found again by its tags, and says itself which stages it holds. So after a crash, an outage or a rerun only
what is missing is written, and nothing twice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Literal

from orchestrator.config.tracking_uri import resolve_experiment, resolve_uri
from orchestrator.core.events import StageEvent, SweepInfo
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact
from orchestrator.core.specs import Plan
from orchestrator.views.tracking.client import MlflowRuns, ReadFile, be_brief
from orchestrator.views.tracking.run_contents import Content, Status, SweepView
from orchestrator.views.tracking.troubles import is_refusal
from orchestrator.views.tracking.view_writer import ViewWriter

_LOGGER = logging.getLogger("orchestrator")

STATUSES: Mapping[str, Status] = {"finished": "FINISHED", "failed": "FAILED", "killed": "KILLED"}
PATIENCE = 20.0
"""Seconds without a success after which `finish` leaves the rest to `orchestrator.sync`."""

KILLED_LIMIT = 5.0
"""Seconds that an interrupted sweep waits for its view in all."""


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
        be_brief()
        self._writer = ViewWriter(
            connect=lambda: MlflowRuns(self.uri, self.experiment, read, warn),
            refused=is_refusal,
            warn=warn,
            name=f"MLflow at {redact(self.uri)}",
        )

    @property
    def complete(self) -> bool:
        """Whether MLflow holds all that was recorded; known once `finish` has returned."""
        return self._writer.complete

    @property
    def reached(self) -> bool:
        """Whether MLflow could be opened at least once."""
        return self._writer.reached

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
