"""Counts of a sweep's trials and stages by state, event by event, and the time that the rest will take. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from typing import Literal

from orchestrator.core.events import KnownAmount, StageEvent
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.pace import Pace, places, wall

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


class TimeLeft:
    """Estimator of the remaining seconds, see `planning.estimates.pace`.

    Args:
        plan: plan of the whole sweep
        finished: stages that need not run
        slots: number of stages that can run at once; None: the largest number seen running at once
        pace: durations of stages in earlier sweeps
    """

    def __init__(
        self, plan: Plan, finished: Mapping[str, object], slots: int | None = None, pace: Pace | None = None
    ) -> None:
        self._plan = plan
        self._left: dict[str, None] = dict.fromkeys(key for key in plan.stages if key not in finished)
        self._slots = slots
        self._places = places(plan)
        self._pace = pace or Pace()
        self._started: dict[str, float] = {}
        self._most_at_once = 1

    def started(self, key: str, time: float) -> None:
        """Note that a stage has started, maybe again."""
        self._started[key] = time
        self._most_at_once = max(self._most_at_once, len(self._started))

    def finished(self, key: str, time: float, record: StageRecord) -> None:
        """Note that a stage has finished; if its start was not seen, its duration comes from the record."""
        begun = self._started.pop(key, None)
        self._pace.learn(self._places[key], record, None if begun is None else time - begun, own=True)
        self._left.pop(key, None)

    def dropped(self, key: str) -> None:
        """Note that a stage will not run."""
        self._started.pop(key, None)
        self._left.pop(key, None)

    def due(self, keys: Iterable[str]) -> None:
        """Count only these stages, which a search runs next."""
        self._left = dict.fromkeys(keys)

    def seconds(self, now: float) -> KnownAmount:
        """Return the estimate at time `now`, with the number of stages whose time is unknown and left out."""
        expected: dict[str, float] = {}
        known: dict[int, float | None] = {}  # thousands of stages have few distinct places
        for key in self._left:
            place = self._places[key]
            if id(place) not in known:
                known[id(place)] = self._pace.expect(place, self._plan.stages[key]).seconds
            whole = known[id(place)]
            if whole is not None:
                begun = self._started.get(key)
                expected[key] = whole if begun is None else max(whole - (now - begun), 0.05 * whole)
        slots = self._slots or self._most_at_once
        return KnownAmount(wall(self._plan, expected, slots), len(self._left) - len(expected))
