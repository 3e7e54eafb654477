"""The dispatcher that all executors share: it picks the next segment of a plan and handles every outcome.

It starts no processes and never waits. An executor asks it for attempts, reports their outcomes, and passes on the
events that it returns.
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
from orchestrator.core.records import NOWHERE, Reached, StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import Attempt, AttemptStart

INTERRUPTED = Failure("the sweep was interrupted")

LOOK_AGAIN = 2.0
"""Seconds until a segment that another driver has claimed is tried again."""


class Claims(Protocol):
    """Claims on stages, by which drivers that share a store avoid training a stage at the same time; see `Leases`."""

    def acquire(self, key: str) -> bool:
        """Try to claim a stage; return whether this driver holds it now."""
        ...

    def release(self, key: str) -> None:
        """Release a claimed stage."""
        ...


class Dispatcher:
    """Hands out the segments of a plan.

    A segment is handed out once the stages that it needs are durable, the longest chain of stages first. Segments whose
    kind runs `alone` come last, one after another, when all others have ended.

    A transient failure is retried, with growing delays, up to `cluster.retries` times for each stage, starting from the
    last durable stage. An attempt that advanced the checkpoint does not count as a retry. Any other failure fails the
    stage and all its descendants, each once; a failure that every trial would meet stops the sweep. If another driver
    has claimed a stage of a segment, the stages that it finishes are taken from the store.

    Args:
        plan: the stages to run; parents outside the plan are durable
        cluster: gives `retries`, `backoff` and `on_error`
        finished: keys -> records of the durable ones; called after a loss, and before a claimed segment begins
        clock: returns monotonic seconds
        claims: claims of the drivers that share the store; None if this is the only driver
        reached: key -> place of its checkpoint; called after a loss
    """

    def __init__(
        self,
        plan: Plan,
        cluster: Cluster,
        finished: Callable[[Iterable[str]], Mapping[str, StageRecord]],
        clock: Callable[[], float] = time.monotonic,
        claims: Claims | None = None,
        reached: Callable[[str], Reached] = lambda _: NOWHERE,
    ) -> None:
        self.stopping, self._reached = False, reached
        self._reason = INTERRUPTED
        self._claims, self._news = claims, list[StageEvent]()
        self._plan, self._cluster, self._durable, self._clock = plan, cluster, finished, clock
        self._segments = list(plan.segments())
        segment_of = {key: index for index, keys in enumerate(self._segments) for key in keys}
        self._needed = [{segment_of[key] for key in plan.needs(keys[0])} for keys in self._segments]
        self._children: list[list[int]] = [[] for _ in self._segments]
        self._height = [len(keys) for keys in self._segments]  # stages in the longest chain that begins here
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
        """Return the attempt to start now, or None."""
        while self._delayed and self._delayed[0][0] <= self._clock():
            _, _, attempt = heapq.heappop(self._delayed)
            self._queue(attempt)
        while self._ready:
            if self._ready[0][0] and (self._running or self._open - self._alone):
                return None  # only segments that run alone are left in the queue, and others have not ended
            _, _, index, attempt = heapq.heappop(self._ready)
            if index in self._open and (claimed := self._claim(attempt)) is not None:
                self._running[index] = claimed
                return claimed
        return None

    def news(self) -> list[StageEvent]:
        """Return the events of stages that other drivers have finished since the last call."""
        news, self._news = self._news, []
        return news

    def delay(self) -> float:
        """Return the seconds until the next retry, or the next try of a claimed segment; infinity if none waits."""
        return max(0.0, self._delayed[0][0] - self._clock()) if self._delayed else float("inf")

    def began(self, attempt: Attempt, when: float) -> list[StageEvent]:
        """Return the events of an attempt that a worker has begun."""
        return [_event("started", attempt.left[0], attempt, when)]

    def take(self, attempt: Attempt, outcome: AttemptStart | StageRecord | Failure | None) -> list[StageEvent]:
        """Handle what a worker reports: its start, the next stage's record, a failure, or its return (None)."""
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
            return self._fail(attempt, Failure(f"the work returned the record of another stage, {outcome.key[:12]}"))
        events = self._finish(attempt, outcome)
        if attempt.left and not self.stopping:
            events += self.began(attempt, events[0].time)
        return events

    def ended(self, attempt: Attempt) -> list[StageEvent]:
        """Handle the return of a worker: its unfinished stages are killed if the sweep is stopping, else failed."""
        if self._running.get(attempt.segment) is not attempt:
            return []
        if not self.stopping:
            return self._fail(attempt, Failure(f"the work ended without a record of stage {attempt.left[0][:12]}"))
        events = self._recover(attempt)
        if attempt.left:
            self._settle(attempt.segment)
        return events + [_event("killed", key, attempt, time.time(), self._reason) for key in attempt.left]

    def stop(self, reason: Failure = INTERRUPTED) -> list[StageEvent]:
        """Hand out no more segments. Waiting stages are killed now, running ones when their worker returns."""
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
            counts = f"attempt {attempt.number}, and `cluster.retries` is {self._cluster.retries}"
            failure = replace(failure, message=f"{failure.message} ({counts})")
        events += self._fail_below(attempt, failure)
        if failure.fatal or self._cluster.on_error == "stop":
            why = "every other trial would fail, too" if failure.fatal else "cluster.on_error=stop"
            events += self.stop(Failure(f"the sweep stopped ({why}): {failure.message}"))
        return events

    def _again(self, attempt: Attempt) -> Attempt:
        """Return the next attempt at the stages that an attempt left."""
        reached = attempt.reached
        with suppress(OrchestratorError):  # the store is unreachable
            reached = self._reached(attempt.left[0])
        spared = attempt.spared + (reached > attempt.reached)
        return replace(_rest(attempt), number=attempt.number + 1, start=None, reached=reached, spared=spared)

    def _fail_below(self, attempt: Attempt, failure: Failure) -> list[StageEvent]:
        (first, *rest), now = attempt.left, time.time()
        cause = replace(failure, message=f"not run, as stage {first[:12]} failed: {failure.message}")
        events = [_event("failed", first, attempt, now, failure)]
        events += [_event("failed", key, attempt, now, cause) for key in rest]
        self._settle(attempt.segment)
        # A segment with several failed inputs fails only once.
        for index in filter(self._open.__contains__, self._descendants(attempt.segment)):
            self._settle(index)
            events += [_event("failed", key, self._first(index), now, cause) for key in self._segments[index]]
        return events

    def _claim(self, attempt: Attempt) -> Attempt | None:
        """Claim the stages left in an attempt and return it; None if they are finished, or another driver holds one."""
        if self._claims is None:
            return attempt
        for key in attempt.left:
            try:
                ours = self._claims.acquire(key)
            except OrchestratorError:  # the attempt itself will report that the store is unreachable
                return attempt
            if not ours:
                self._release_claims(attempt.left)
                self._news += self._recover(attempt)
                if attempt.left:
                    heapq.heappush(self._delayed, (self._clock() + LOOK_AGAIN, attempt.segment, _rest(attempt)))
                return None
        self._news += self._recover(attempt)
        return _rest(attempt) if attempt.left else None

    def _release_claims(self, keys: Iterable[str]) -> None:
        if self._claims is not None:
            with suppress(OrchestratorError):  # claims expire by themselves
                for key in keys:
                    self._claims.release(key)

    def _recover(self, attempt: Attempt) -> list[StageEvent]:
        """Finish the stages that a lost worker, or another driver, has committed without an event."""
        try:
            found = self._durable(attempt.left)
        except OrchestratorError:  # the store is unreachable; the next attempt will find the stages
            return []
        standing = list(takewhile(found.__contains__, attempt.left))
        while standing and self._is_needed(attempt, standing[-1]) and WEIGHTS not in found[standing[-1]].files:
            standing.pop()  # its weights were dropped; repeating the stage puts them back
        return [event for key in standing for event in self._finish(attempt, found[key])]

    def _is_needed(self, attempt: Attempt, key: str) -> bool:
        """Whether an unfinished stage starts from this stage's weights."""
        return key != attempt.specs[-1].key or any(child in self._open for child in self._children[attempt.segment])

    def _finish(self, attempt: Attempt, record: StageRecord) -> list[StageEvent]:
        record = record.sharing(attempt.specs[attempt.done])
        finished = replace(_event("finished", record.key, attempt, time.time()), record=record)
        attempt.done, attempt.number, attempt.spared, attempt.reached = attempt.done + 1, 1, 0, NOWHERE
        self._release_claims([record.key])
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
        """Queue a segment if all the stages that it needs are durable."""
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
            self._release_claims(attempt.left)


def _located(failure: Failure, start: AttemptStart | None) -> Failure:
    """Return the failure with the log and host of the attempt, unless it has its own."""
    if start is None:
        return failure
    return replace(failure, log=failure.log or start.log, host=failure.host or start.host)


def _rest(attempt: Attempt) -> Attempt:
    lineage = (*attempt.lineage, *attempt.specs[: attempt.done])
    return replace(attempt, specs=attempt.specs[attempt.done :], lineage=lineage, done=0)


def _event(kind: EventKind, key: str, attempt: Attempt, when: float, failure: Failure | None = None) -> StageEvent:
    return StageEvent(kind=kind, key=key, time=when, failure=failure, attempt=attempt.number)
