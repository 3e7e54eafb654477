"""Executor without Ray: runs one stage after another in this process and thread, so that a debugger works."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from orchestrator.config.cluster import grace
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.work_order import Passed, Preflight, Worker, WorkOrder
from orchestrator.execution.executor import Executor
from orchestrator.execution.perform import PREFLIGHT, perform


class InlineExecutor(Executor):
    """Runs a plan in this process, which needs no start; logs hold the tracebacks of failures."""

    def on_every_node(self, check: Callable[[], object]) -> None:
        """Call `check` in this process, the only node."""
        check()

    def run(self, plan: Plan) -> Iterator[StageEvent]:
        """Run every stage of `plan` (parents outside the plan are in the store) and yield events as they happen."""
        dispatcher = self.dispatcher(plan)
        while not dispatcher.done:
            if self.cancelled.is_set():
                yield from dispatcher.stop()
            elif (attempt := dispatcher.next()) is None:
                yield from dispatcher.news()
                self.cancelled.wait(0.0 if dispatcher.done else min(dispatcher.delay(), 1.0))
            else:
                yield from dispatcher.news()
                yield from dispatcher.began(attempt, time.time())
                log = self.log(f"{attempt.specs[0].key[:12]}.{attempt.number}")
                order = WorkOrder(attempt.specs, self._worker(log), attempt.lineage, attempt.number)
                for outcome in perform(order, self.work):
                    yield from dispatcher.take(attempt, outcome)
                if self.cancelled.is_set():
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
            store=self.store,
            device="cuda:0" if self.cluster.gpus_per_trial else "cpu",
            threads=self.cluster.thread_count,
            cancelled=self.cancelled.is_set,
            grace=grace(self.cluster.grace),
            stage_timeout=self.cluster.stage_timeout,
            report=self.watch,
            log=log,
        )
