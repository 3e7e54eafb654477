"""Executor without Ray: runs one stage after another in this process and thread, so that a debugger works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Self

from orchestrator.config.cluster import Cluster, grace
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Passed, Preflight, Report, StageStore, Work, Worker, WorkOrder, unheard
from orchestrator.execution.dispatch import Claims, Dispatcher
from orchestrator.execution.perform import DEFAULT_WORK, PREFLIGHT, perform


class InlineExecutor:
    """Runs a plan in this process.

    Args:
        cluster: gives the threads, the use of a GPU, timeouts and the handling of failures
        store: where finished stages are durable
        work: function that runs a segment, or its `module:name`
        logs: folder for the tracebacks of failures, one file for each attempt
        claims: claims of the drivers that share the store; None if this is the only driver
        watch: called with the metrics of running stages
    """

    def __init__(
        self,
        cluster: Cluster,
        store: StageStore,
        *,
        work: Work | str = DEFAULT_WORK,
        logs: str | Path = "logs",
        claims: Claims | None = None,
        watch: Report = unheard,
    ) -> None:
        self._cluster, self._store, self._work, self._claims = cluster, store, work, claims
        self._cancelled, self._watch, self._logs = Event(), watch, Path(logs).absolute()

    def prestart(self) -> None:
        """Do nothing: this process needs no start."""

    def start(self) -> None:
        """Do nothing: this process needs no start."""

    def on_every_node(self, check: Callable[[], object]) -> None:
        """Call `check` in this process, the only node."""
        check()

    def close(self) -> None:
        """Do nothing: no process is left running."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, plan: Plan) -> Iterator[StageEvent]:
        """Run every stage of `plan` (parents outside the plan are in the store) and yield events as they happen."""
        dispatcher = Dispatcher(
            plan, self._cluster, self._store.finished, claims=self._claims, reached=self._store.checkpoints.reached
        )
        while not dispatcher.done:
            if self._cancelled.is_set():
                yield from dispatcher.stop()
            elif (attempt := dispatcher.next()) is None:
                yield from dispatcher.news()
                self._cancelled.wait(0.0 if dispatcher.done else min(dispatcher.delay(), 1.0))
            else:
                yield from dispatcher.news()
                yield from dispatcher.began(attempt, time.time())
                log = str(self._logs / f"{attempt.specs[0].key[:12]}.{attempt.number}.log")  # holds tracebacks only
                order = WorkOrder(attempt.specs, self._worker(log), attempt.lineage, attempt.number)
                for outcome in perform(order, self._work):
                    yield from dispatcher.take(attempt, outcome)
                if self._cancelled.is_set():
                    yield from dispatcher.stop()
                yield from dispatcher.ended(attempt)

    def preflight(
        self, stages: Sequence[tuple[StageSpec, ...]], work: Preflight | str = PREFLIGHT
    ) -> Iterator[tuple[int, Passed | Failure]]:
        """Rehearse the last of each group of `stages`, below its lineage; yield the group's index and the outcome."""
        for index, (*lineage, spec) in enumerate(stages):
            for outcome in perform(WorkOrder((spec,), self._worker(), tuple(lineage)), work):
                yield index, outcome

    def _worker(self, log: str = "") -> Worker:
        return Worker(
            store=self._store,
            device="cuda:0" if self._cluster.gpus_per_trial else "cpu",
            threads=self._cluster.thread_count,
            cancelled=self._cancelled.is_set,
            grace=grace(self._cluster.grace),
            stage_timeout=self._cluster.stage_timeout,
            report=self._watch,
            log=log,
        )

    def cancel(self) -> None:
        """End the running stage at its next batch and start no other; `run` then yields `killed` events and returns."""
        self._cancelled.set()
