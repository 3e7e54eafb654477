"""Which segment of a plan runs next, and what follows from each outcome: the part that all executors share.

No processes, no waiting: an executor asks for attempts, tells what came of them, and passes the events on.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import EventKind, Failure, StageEvent
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import Attempt, AttemptStart

INTERRUPTED = Failure("the sweep was interrupted")

LOOK_AGAIN = 2.0
"""Seconds after which a segment that another driver holds is looked at again."""


class Claims(Protocol):
    """Keeps drivers that share a store from training a stage at the same time, as its `Leases` do."""

    def acquire(self, key: str) -> bool:
        """Take the stage and say whether it is ours now."""
        ...

    def release(self, key: str) -> None:
        """Give it back."""
        ...


class Dispatcher:
    """Hands out segments, longest chain of stages first, each once what it needs is durable; those of kinds that run
    `alone` come one after another at the end, when all else has ended.

    A transient failure is retried up to `cluster.retries` times a stage, each time later, from the last durable one on;
    an attempt that left a further checkpoint than the one before costs none of these. Any other fails the stage and,
    once, all that descend from it; one that awaits every trial stops the sweep. Of a segment of which another driver
    has claimed a stage, what that driver finishes is taken from the store.

    Args:
        plan: what to run; parents outside of it are durable
        cluster: of which `retries`, `backoff` and `on_error` are meant
        finished: keys -> records of those that are durable, asked after a loss, and before a claimed segment begins
        clock: seconds, monotonic
        claims: of the drivers that share the store; None where there is but this one
        reached: key -> step of its checkpoint, -1 where it has none, asked after a loss
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        finished: Callable[[Iterable[str]], Mapping[str, StageRecord]],
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
        reached: Callable[[str], int] = lambda _: -1,
    ) -> None:
        self.stopping, self._reached = False, reached
        self._reason = INTERRUPTED
        self._claims, self._news = claims, list[StageEvent]()
        self._plan, self._cluster, self._durable, self._clock = plan, cluster, finished, clock
        self._segments = list(plan.segments())
        segment_of = {key: index for index, keys in enumerate(self._segments) for key in keys}
        self._needed = [{segment_of[key] for key in plan.needs(keys[0])} for keys in self._segments]
        self._children: list[list[int]] = [[] for _ in self._segments]
        self._height = [len(keys) for keys in self._segments]  # of the longest chain of stages that begins here
        for index in reversed(range(len(self._segments))):
            for needed in self._needed[index]:
                self._children[needed].append(index)
                self._height[needed] = max(self._height[needed], len(self._segments[needed]) + self._height[index])
        self._open = set(range(len(self._segments)))
        self._running: dict[int, Attempt] = {}
        self._alone = {index for index, keys in enumerate(self._segments) if KINDS[plan.stages[keys[0]].kind].alone}
        self._ready: list[tuple[bool, int, int, Attempt]] = []
        self._delayed: list[tuple[float, int, Attempt]] = []
        for index in range(len(self._segments)):
            self._release(index)

    @property
    def done(self) -> bool:
        """Whether every stage is finished, failed or killed."""
        return not self._open

    def next(self) -> Attempt | None:
        """Return the attempt to start now, if there is one."""
        while self._delayed and self._delayed[0][0] <= self._clock():
            _, _, attempt = heapq.heappop(self._delayed)
            self._queue(attempt)
        while self._ready:
            if self._ready[0][0] and (self._running or self._open - self._alone):
                return None  # the first of what runs alone: its time has not come
            _, _, index, attempt = heapq.heappop(self._ready)
            if index in self._open and (claimed := self._claim(attempt)) is not None:
                self._running[index] = claimed
                return claimed
        return None

    def news(self) -> list[StageEvent]:
        """Return, once, the events of stages that other drivers have finished."""
        news, self._news = self._news, []
        return news

    def delay(self) -> float:
        """Return the seconds until a retry is due, or a segment to be looked at again; infinity if none is waiting."""
        return max(0.0, self._delayed[0][0] - self._clock()) if self._delayed else float("inf")

    def began(self, attempt: Attempt, when: float) -> list[StageEvent]:
        """The worker has begun `attempt`."""
        return [_event("started", attempt.left[0], attempt, when)]

    def take(self, attempt: Attempt, outcome: AttemptStart | StageRecord | Failure | None) -> list[StageEvent]:
        """The worker has begun, has finished the next stage of `attempt`, has failed at it, or has returned (None)."""
        if self._running.get(attempt.segment) is not attempt:
            return []
        if outcome is None:
            return self.ended(attempt)
        if isinstance(outcome, AttemptStart):
            attempt.start = outcome
            return self.began(attempt, outcome.time)
        if isinstance(outcome, Failure):
            return self._fail(attempt, _located(outcome, attempt.start))
        if outcome.key not in attempt.left[:1]:
            return self._fail(attempt, Failure(f"the work gave the record of another stage, {outcome.key[:12]}"))
        events = self._finish(attempt, outcome)
        if attempt.left and not self.stopping:
            events += self.began(attempt, events[0].time)
        return events

    def ended(self, attempt: Attempt) -> list[StageEvent]:
        """The worker has returned; what it left undone is killed if the sweep is stopping and failed otherwise."""
        if self._running.get(attempt.segment) is not attempt:
            return []
        if not self.stopping:
            return self._fail(attempt, Failure(f"the work ended without a record of stage {attempt.left[0][:12]}"))
        events = self._recover(attempt)
        if attempt.left:
            self._settle(attempt.segment)
        return events + [_event("killed", key, attempt, time.time(), self._reason) for key in attempt.left]

    def stop(self, reason: Failure = INTERRUPTED) -> list[StageEvent]:
        """Hand out nothing more; what is not running is killed at once, and the rest once its worker returns."""
        self.stopping, self._reason = True, reason
        waiting = [*(ready[-1] for ready in self._ready), *(delayed[-1] for delayed in self._delayed)]
        attempts = {attempt.segment: attempt for attempt in waiting}
        self._ready, self._delayed = [], []
        events = []
        for index in sorted(self._open - self._running.keys()):
            self._settle(index)
            attempt = attempts.get(index) or self._first(index)
            events += [_event("killed", key, attempt, time.time(), reason) for key in attempt.left]
        return events

    def _fail(self, attempt: Attempt, failure: Failure) -> list[StageEvent]:
        if self.stopping:
            return self.ended(attempt)
        events = self._recover(attempt) if failure.transient else []
        if not attempt.left:
            return events
        again = self._again(attempt)
        losses = attempt.number - again.spared
        if failure.transient and losses <= self._cluster.retries:
            del self._running[attempt.segment]
            due = self._clock() + self._cluster.backoff * 2 ** max(0, losses - 1)
            heapq.heappush(self._delayed, (due, attempt.segment, again))
            event = _event("retried", again.left[0], again, time.time(), failure)
            return [*events, replace(event, reached=again.reached)]
        if failure.transient:
            counts = f"attempt {attempt.number} at it, and `cluster.retries` is {self._cluster.retries}"
            failure = replace(failure, message=f"{failure.message} ({counts})")
        events += self._fail_below(attempt, failure)
        if failure.fatal or self._cluster.on_error == "stop":
            why = "no trial could do better" if failure.fatal else "cluster.on_error=stop"
            events += self.stop(Failure(f"the sweep stopped ({why}): {failure.message}"))
        return events

    def _again(self, attempt: Attempt) -> Attempt:
        """Return the next attempt at what is left of one."""
        reached = attempt.reached
        with suppress(OrchestratorError):  # the store is away
            reached = self._reached(attempt.left[0])
        spared = attempt.spared + (reached > attempt.reached)
        return replace(_rest(attempt), number=attempt.number + 1, start=None, reached=reached, spared=spared)

    def _fail_below(self, attempt: Attempt, failure: Failure) -> list[StageEvent]:
        (first, *rest), now = attempt.left, time.time()
        cause = replace(failure, message=f"not run, as stage {first[:12]} failed: {failure.message}")
        events = [_event("failed", first, attempt, now, failure)]
        events += [_event("failed", key, attempt, now, cause) for key in rest]
        self._settle(attempt.segment)
        for index in filter(self._open.__contains__, self._descendants(attempt.segment)):  # once, of several inputs
            self._settle(index)
            events += [_event("failed", key, self._first(index), now, cause) for key in self._segments[index]]
        return events

    def _claim(self, attempt: Attempt) -> Attempt | None:
        """Return what is left of the attempt, claimed; None where others finished it, or hold a stage of it now."""
        if self._claims is None:
            return attempt
        for key in attempt.left:
            try:
                ours = self._claims.acquire(key)
            except OrchestratorError:  # claims only save work; the attempt itself will say that the store is away
                return attempt
            if not ours:
                self._give_back(attempt.left)
                self._news += self._recover(attempt)
                if attempt.left:
                    heapq.heappush(self._delayed, (self._clock() + LOOK_AGAIN, attempt.segment, _rest(attempt)))
                return None
        self._news += self._recover(attempt)
        return _rest(attempt) if attempt.left else None

    def _give_back(self, keys: Iterable[str]) -> None:
        if self._claims is not None:
            with suppress(OrchestratorError):  # they lapse by themselves
                for key in keys:
                    self._claims.release(key)

    def _recover(self, attempt: Attempt) -> list[StageEvent]:
        """Finish what a lost worker, or another driver, had made durable without our hearing of it."""
        try:
            found = self._durable(attempt.left)
        except OrchestratorError:  # the store is away: the next attempt will see
            return []
        standing = list(takewhile(found.__contains__, attempt.left))
        while standing and self._is_needed(attempt, standing[-1]) and WEIGHTS not in found[standing[-1]].files:
            standing.pop()  # its weights were dropped, and repeating it puts them back
        return [event for key in standing for event in self._finish(attempt, found[key])]

    def _is_needed(self, attempt: Attempt, key: str) -> bool:
        """Whether work that is not finished starts from the stage's weights."""
        return key != attempt.specs[-1].key or any(child in self._open for child in self._children[attempt.segment])

    def _finish(self, attempt: Attempt, record: StageRecord) -> list[StageEvent]:
        finished = replace(_event("finished", record.key, attempt, time.time()), record=record)
        attempt.done, attempt.number, attempt.spared, attempt.reached = attempt.done + 1, 1, 0, -1
        self._give_back([record.key])
        if not attempt.left:
            self._settle(attempt.segment)
            if not self.stopping:
                for child in self._children[attempt.segment]:
                    self._release(child)
        return [finished]

    def _descendants(self, segment: int) -> Iterator[int]:
        pending = list(self._children[segment])
        seen: set[int] = set()
        while pending:
            index = pending.pop()
            if index not in seen:
                seen.add(index)
                pending.extend(self._children[index])
                yield index

    def _release(self, index: int) -> None:
        """Hand a segment out from now on if all that it needs is durable."""
        if not self._needed[index] & self._open:
            self._queue(self._first(index))

    def _first(self, index: int) -> Attempt:
        keys = self._segments[index]
        return Attempt(index, 1, tuple(self._plan.stages[key] for key in keys), self._plan.lineage(keys[0]))

    def _queue(self, attempt: Attempt) -> None:
        index = attempt.segment
        heapq.heappush(self._ready, (index in self._alone, -self._height[index], index, attempt))

    def _settle(self, index: int) -> None:
        self._open.discard(index)
        attempt = self._running.pop(index, None)
        if attempt is not None:
            self._give_back(attempt.left)


def _located(failure: Failure, start: AttemptStart | None) -> Failure:
    """Return the failure with where it happened, if it does not say so itself."""
    if start is None:
        return failure
    return replace(failure, log=failure.log or start.log, host=failure.host or start.host)


def _rest(attempt: Attempt) -> Attempt:
    lineage = (*attempt.lineage, *attempt.specs[: attempt.done])
    return replace(attempt, specs=attempt.specs[attempt.done :], lineage=lineage, done=0)


def _event(kind: EventKind, key: str, attempt: Attempt, when: float, failure: Failure | None = None) -> StageEvent:
    return StageEvent(kind=kind, key=key, time=when, failure=failure, attempt=attempt.number)
