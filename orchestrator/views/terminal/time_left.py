"""When a sweep will be done: the work left, at the pace seen so far, on as many slots as have been busy. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.events import Amount
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.pace import Pace, places, wall


class TimeLeft:
    """Estimates the seconds that are left, as `planning.pace` says.

    Args:
        plan: the whole sweep
        finished: stages that need not run
        slots: how many can run at once where that is known, else the most that did
        pace: what earlier sweeps tell
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
        """Note that a stage has started (again)."""
        self._started[key] = time
        self._most_at_once = max(self._most_at_once, len(self._started))

    def finished(self, key: str, time: float, record: StageRecord) -> None:
        """Note that a stage has finished; where its start was not seen, the record says how long it took."""
        begun = self._started.pop(key, None)
        self._pace.learn(self._places[key], record, None if begun is None else time - begun, own=True)
        self._left.pop(key, None)

    def dropped(self, key: str) -> None:
        """Note that a stage will not be run."""
        self._started.pop(key, None)
        self._left.pop(key, None)

    def seconds(self, now: float) -> Amount:
        """Return the estimate at time `now`, and of how many stages it leaves out the time, which is not known."""
        expected: dict[str, float] = {}
        for key in self._left:
            whole = self._pace.expect(self._places[key], self._plan.stages[key]).seconds
            if whole is not None:
                begun = self._started.get(key)
                expected[key] = whole if begun is None else max(whole - (now - begun), 0.05 * whole)
        slots = self._slots or self._most_at_once
        return Amount(wall(self._plan, expected, slots), len(self._left) - len(expected))
