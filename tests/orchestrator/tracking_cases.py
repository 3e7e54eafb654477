"""A tracker that writes in this process, as a test sees it: beside what it is told, as the real one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Literal

from factories import finished, sweep_info

from orchestrator.core.errors import CannotKeep
from orchestrator.core.events import StageEvent, SweepInfo, Tracker
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.tracking.run_contents import Content, SweepView
from orchestrator.views.tracking.view_writer import Requests, ViewWriter


def masks(key: str, name: str) -> bytes:
    return f"{name} of {key}".encode()


class Writing(Tracker):
    """Keeps a view by a `ViewWriter` in a thread; `said` is what it told the user."""

    def __init__(
        self, uri: str, read: Callable[[str, str], bytes] = masks, experiment: str = "pruning", **reads: Any
    ) -> None:
        self.complete = False
        self.said: list[str] = []
        self.wrote = 0
        self._requests = Requests()
        self._writer = ViewWriter(
            self._requests, self.said.append, self._count, read=read, uri=uri, experiment=experiment, **reads
        )
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        self._requests.put(("start", sweep, plan, dict(finished)))

    def record(self, event: StageEvent) -> None:
        self._requests.put(("record", event))

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        self._requests.put(("finish", status, report))
        self._thread.join(120)
        assert not self._thread.is_alive()

    def _count(self, _: int) -> None:
        self.wrote += 1

    def _write(self) -> None:
        try:
            self._writer.write()
            self.complete = True
        except CannotKeep as error:
            self.said.append(str(error))


def track(
    uri: str,
    plan: Plan,
    records: Mapping[str, StageRecord],
    *,
    before: Mapping[str, StageRecord] | None = None,
    **reads: Any,
) -> Writing:
    """Track a whole sweep of which the stages `before` were finished when it began."""
    tracker = Writing(uri, **reads)
    tracker.start(sweep_info(), plan, before or {})
    for key, record in records.items():
        if key not in (before or {}):
            tracker.record(finished(record))
    tracker.finish("finished", {"comparison/table.csv": b"a,b\n"})
    return tracker


def undisturbed(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, Content]:
    """Return what each trial's run should hold in the end."""
    view = SweepView(sweep_info(), plan, records)
    contents = {trial.name: view.content(index) for index, trial in enumerate(plan.trials)}
    return {name: content for name, content in contents.items() if content is not None}


def points(contents: Any) -> dict[str, list[tuple[int, float, int]]]:
    """Return the points of a run as MLflow gives them: metric -> (step, value, milliseconds), sorted."""
    found: dict[str, list[tuple[int, float, int]]] = {}
    for point in contents.points:
        found.setdefault(point.key, []).append((point.step, point.value, round(1000 * point.time)))
    return {key: sorted(values) for key, values in found.items()}
