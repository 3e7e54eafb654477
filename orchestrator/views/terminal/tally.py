"""How many trials and stages of a sweep wait, run, are done or have failed: kept up event by event. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.core.events import StageEvent
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan


class Tally:
    """Counts of a sweep; a trial runs when a stage of its chain does, and is done when all of them are."""

    def __init__(self, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        self.plan = plan
        self.records = {key: record for key, record in finished.items() if key in plan.stages}
        self.running: dict[str, float] = {}
        """Key of a running stage -> when it started."""
        self.lost: set[str] = set()
        """Stages that failed or were killed, with the stages below them."""
        self._missing = [sum(key not in self.records for key in trial.stages) for trial in plan.trials]
        self._busy = [0] * len(plan.trials)
        self._failed = [False] * len(plan.trials)
        self.done = sum(missing == 0 for missing in self._missing)
        self.failed = 0
        self.active = 0

    @property
    def waiting(self) -> int:
        """Trials of which nothing runs and that are neither done nor failed."""
        return len(self.plan.trials) - self.done - self.failed - self.active

    @property
    def settled(self) -> int:
        """Stages that are done or lost."""
        return len(self.records) + len(self.lost)

    def take(self, event: StageEvent) -> None:
        """Count one event."""
        if event.key not in self.plan.stages or event.key in self.records:
            return  # what is finished is durable: nothing that is heard later changes it
        if event.kind == "started":
            self._recover(event.key)
            self._start(event.key, event.time)
            return
        self._stop(event.key)
        if event.kind == "retried":
            self._recover(event.key)
        elif event.kind == "finished" and event.record is not None:
            self._recover(event.key)
            self._finish(event.key, event.record)
        elif event.kind in ("failed", "killed") and event.key not in self.lost:
            self.lost.add(event.key)
            self._recount(event.key)

    def _start(self, key: str, time: float) -> None:
        if key not in self.running:
            for index in self.plan.trials_of[key]:
                self._busy[index] += 1
                self.active += self._busy[index] == 1 and not self._failed[index]
        self.running[key] = time

    def _stop(self, key: str) -> None:
        if self.running.pop(key, None) is not None:
            for index in self.plan.trials_of[key]:
                self._busy[index] -= 1
                self.active -= self._busy[index] == 0 and not self._failed[index]

    def _finish(self, key: str, record: StageRecord) -> None:
        if key not in self.records:
            for index in self.plan.trials_of[key]:
                self._missing[index] -= 1
                self.done += self._missing[index] == 0
        self.records[key] = record

    def _recover(self, key: str) -> None:
        if key in self.lost:
            self.lost.discard(key)
            self._recount(key)

    def _recount(self, key: str) -> None:
        """Let the trials that contain `key` be failed exactly when one of their stages is lost."""
        for index in self.plan.trials_of[key]:
            failed = any(stage in self.lost for stage in self.plan.trials[index].stages)
            if failed != self._failed[index]:
                self._failed[index] = failed
                self.failed += 1 if failed else -1
                self.active += (0 if failed else 1) - (1 if failed else 0) if self._busy[index] else 0
