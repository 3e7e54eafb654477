"""The executor without Ray: one stage after another in this process and thread, so that a debugger works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Self

from orchestrator.config import submission
from orchestrator.config.cluster import Cluster
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Passed, Preflight, Report, StageStore, Work, WorkOrder, unheard
from orchestrator.execution.dispatch import Claims, Dispatcher
from orchestrator.execution.perform import DEFAULT_WORK, PREFLIGHT, perform


class InlineExecutor:
    """Runs a plan here and now.

    Args:
        cluster: of which the threads, whether there is a GPU, and what to do about failures are meant
        store: where finished stages are durable
        work: what runs a segment, or its `module:name`
        logs: the folder for the tracebacks of what fails, one file an attempt
        claims: of the drivers that share the store, if there may be others
        watch: told the points of the stages that run
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
        """Nothing needs to be started."""

    def start(self) -> None:
        """Nothing needs to be started."""

    def on_every_node(self, check: Callable[[], object]) -> None:
        """Call `check` here, the only node."""
        check()

    def close(self) -> None:
        """Nothing is left running."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, plan: Plan) -> Iterator[StageEvent]:
        """Run every stage of `plan` (parents outside it are in the store) and yield what happens, as it happens."""
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
                order = self._order(attempt.specs, attempt.lineage, attempt.number)
                log = str(self._logs / f"{attempt.specs[0].key[:12]}.{attempt.number}.log")  # of tracebacks alone
                for outcome in perform(replace(order, log=log), self._work):
                    yield from dispatcher.take(attempt, outcome)
                if self._cancelled.is_set():
                    yield from dispatcher.stop()
                yield from dispatcher.ended(attempt)

    def preflight(
        self, stages: Sequence[tuple[StageSpec, ...]], work: Preflight | str = PREFLIGHT
    ) -> Iterator[tuple[int, Passed | Failure]]:
        """Try each of `stages`, after its lineage, here; yield its index and what came of it."""
        for index, (*lineage, spec) in enumerate(stages):
            for outcome in perform(self._order((spec,), tuple(lineage), 1), work):
                yield index, outcome

    def _order(self, specs: tuple[StageSpec, ...], lineage: tuple[StageSpec, ...], attempt: int) -> WorkOrder:
        return WorkOrder(
            specs=specs,
            lineage=lineage,
            store=self._store,
            device="cuda:0" if self._cluster.gpus_per_trial else "cpu",
            threads=self._cluster.thread_count,
            attempt=attempt,
            cancelled=self._cancelled.is_set,
            grace=submission.grace(self._cluster.grace),
            stage_timeout=self._cluster.stage_timeout,
            report=self._watch,
        )

    def cancel(self) -> None:
        """Hand out nothing more and end the running stage at its next batch; `run` then yields `killed` and returns."""
        self._cancelled.set()
