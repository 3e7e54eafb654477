"""Counts of a sweep's trials and stages by state, updated event by event. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from typing import Literal

from orchestrator.core.events import StageEvent
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

TrialState = Literal["waiting", "running", "done", "failed", "stopped"]


class Tally:
    """Counts of a sweep. A trial runs if one of its stages runs, and is done if all of them are."""

    def __init__(self, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        self.plan = plan
        self.records = {key: record for key, record in finished.items() if key in plan.stages}
        self.running: dict[str, float] = {}
        """Key of a running stage -> Unix time of its start."""
        self.lost: set[str] = set()
        """Keys of stages that failed or were killed, and of stages that depend on them."""
        self._stopped: Container[str] = ()
        """Names of the trials that a search does not run."""
        self._states = [*map(self._state_of, range(len(plan.trials)))]

    @property
    def settled(self) -> int:
        """Number of stages that are done or lost."""
        return len(self.records) + len(self.lost)

    def trials(self) -> Counter[TrialState]:
        """Return state -> number of trials."""
        return Counter(self._states)

    def state(self, trial: int) -> TrialState:
        """Return the state of a trial."""
        return self._states[trial]

    def take(self, event: StageEvent) -> None:
        """Count one event."""
        if event.key not in self.plan.stages or event.key in self.records:
            return  # a finished stage is durable: no later event changes it
        self.running.pop(event.key, None)
        self.lost.discard(event.key)
        if event.kind == "started":
            self.running[event.key] = event.time
        elif event.kind in ("failed", "killed"):
            self.lost.add(event.key)
        elif event.record is not None:
            self.records[event.key] = event.record
        for index in self.plan.trials_of[event.key]:
            self._states[index] = self._state_of(index)

    def stop(self, names: Container[str]) -> None:
        """Count the trials that a search does not run."""
        self._stopped = names
        self._states = [*map(self._state_of, range(len(self.plan.trials)))]

    def _state_of(self, trial: int) -> TrialState:
        keys = self.plan.work[trial]
        if all(key in self.records for key in keys):
            return "done"
        keys = (*keys, *self.plan.trials[trial].parts)
        if not self.lost.isdisjoint(keys):
            return "failed"
        if self.plan.trials[trial].name in self._stopped:
            return "stopped"
        return "waiting" if self.running.keys().isdisjoint(keys) else "running"
