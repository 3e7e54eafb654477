"""Base of all executors: the settings of a run, cancelling, and the context that starts and ends them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Self

from orchestrator.config.cluster import Cluster
from orchestrator.core.specs import Plan
from orchestrator.core.work_order import Report, StageStore, Work, unheard
from orchestrator.execution.dispatch import Claims, Dispatcher
from orchestrator.execution.perform import DEFAULT_WORK


@dataclass(eq=False)
class Executor:
    """Runs a plan: a context manager, which starts and ends what the stages run on.

    Args:
        cluster: address, resources, threads, timeouts and the handling of failures
        store: where finished stages are durable; every node must reach it
        work: function that runs a segment, or its `module:name`; every node must be able to import it
        logs: folder on each worker for the output of the work, one file for each attempt
        claims: claims of the drivers that share the store; None if this is the only driver
        watch: called with the metrics of running stages
        processes: largest number of processes of a trial
    """

    cluster: Cluster
    store: StageStore
    work: Work | str = DEFAULT_WORK
    logs: str | Path = "logs"
    claims: Claims | None = None
    watch: Report = unheard
    processes: int = 1
    cancelled: Event = field(default_factory=Event, init=False)

    def __post_init__(self) -> None:
        self.logs = Path(self.logs).absolute()

    def prestart(self) -> None:
        """Begin to start in the background, and return at once."""

    def start(self) -> None:
        """Start what the stages run on."""

    def close(self) -> None:
        """End what the stages run on."""

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self) -> None:
        """End running stages at their next batch and start no others; `run` then yields `killed` events and returns."""
        self.cancelled.set()

    def dispatcher(self, plan: Plan) -> Dispatcher:
        """Return a new dispatcher of a plan's segments."""
        reached = self.store.checkpoints.reached
        return Dispatcher(plan, self.cluster, self.store.finished, claims=self.claims, reached=reached)

    def log(self, name: str) -> str:
        """Return the path of a log file."""
        return str(Path(self.logs, f"{name}.log"))
