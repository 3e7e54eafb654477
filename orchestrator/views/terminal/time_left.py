"""Estimate of a sweep's remaining time: remaining work, at the pace seen so far, on the busy slots. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from orchestrator.core.events import Amount
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.estimates.pace import Pace, places, wall


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

    def seconds(self, now: float) -> Amount:
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
        return Amount(wall(self._plan, expected, slots), len(self._left) - len(expected))
