"""Cluster of simulated nodes for `bench_scale.py`: the executor's own loop and dispatcher, without Ray and sleeping.

Stages begin and end in simulated time, and the clock jumps from one event to the next. Orders and records are pickled
as Ray would pickle them. The seconds that the simulation itself takes are counted apart.
"""

from __future__ import annotations

import heapq
import pickle
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from orchestrator.config.cluster import Cluster
from orchestrator.core.metrics import Metric
from orchestrator.core.records import CurvePoint, StageRecord
from orchestrator.core.specs import StageSpec
from orchestrator.core.work_order import Attempt, AttemptStart, WorkOrder
from orchestrator.execution.on_ray.ray_executor import RayExecutor
from orchestrator.execution.placement import Node, Watch
from orchestrator.store.store import Store
from orchestrator.views.tracking.run_contents import SweepView
from orchestrator.views.tracking.view_writer import Requests
from scripts.benchmarks.sleeping import make_record

Event = tuple[Attempt, AttemptStart | StageRecord | None]


class SimulatedTasks:
    """Attempts on simulated slots, in place of `orchestrator.execution.on_ray.ray_tasks.Tasks`.

    Args:
        nodes: number of nodes
        slots: number of trials that run on a node at once
        seconds: seconds of a trial on average; stages take from half of it to three halves
    """

    def __init__(self, nodes: int, slots: int, seconds: float) -> None:
        self.own = 0.0
        """CPU seconds of the simulation, which are not the driver's."""
        self.now = self.began = time.time()
        """Simulated time."""
        self.busy_at: float | None = None
        """CPU seconds of the process, without the simulation, when all slots were busy for the first time."""
        self._free, self._slots, self._nodes, self._seconds = nodes * slots, nodes * slots, nodes, seconds
        self._waiting: deque[Attempt] = deque()
        self._due: list[tuple[float, int, Callable[[], Event]]] = []
        self._count = self._held = 0
        self._draw = random.Random(0)

    def __len__(self) -> int:
        return self._held

    def submit(self, attempt: Attempt, order: WorkOrder, work: object, *, fresh: bool = False) -> None:
        """Pickle an order, and start it as soon as a slot is free."""
        del work, fresh
        _pickled(order)
        with self._apart():
            self._held += 1
            self._waiting.append(attempt)
            self._start()

    def receive(self, timeout: float) -> Iterator[Event]:
        """Jump to the next event and yield it with all others of that moment."""
        del timeout
        moment = self._due[0][0]
        while self._due and self._due[0][0] == moment:
            with self._apart():
                self.now, _, make = heapq.heappop(self._due)
                attempt, item = make()
                content = pickle.dumps(item, protocol=pickle.HIGHEST_PROTOCOL)
                if item is None:
                    self._held, self._free = self._held - 1, self._free + 1
                    self._start()
            yield attempt, pickle.loads(content)

    def points(self) -> Iterator[tuple[str, CurvePoint, Metric]]:
        """There are none."""
        yield from ()

    def drop(self, nodes: Collection[str] | None = None) -> list[Attempt]:
        """Return no attempts: no node dies."""
        del nodes
        return []

    def end(self, patience: float) -> None:
        """Do nothing: nothing is left running."""

    def _start(self) -> None:
        """Start waiting attempts on free slots."""
        while self._free and self._waiting:
            self._free -= 1
            attempt = self._waiting.popleft()
            node = f"node-{self._free % self._nodes}"
            self._at(self.now, partial(_begin, attempt, AttemptStart(node, node, f"logs/{node}", self.now)))
            then = self.now
            for spec in attempt.specs:
                started, then = then, then + self._seconds * self._draw.uniform(0.5, 1.5) / len(attempt.specs)
                self._at(then, partial(_end, attempt, spec, then - started, started))
            self._at(then, partial(_return, attempt))
            if not self._free and self.busy_at is None:
                self.busy_at = time.process_time() - self.own

    def _at(self, moment: float, make: Callable[[], Event]) -> None:
        self._count += 1
        heapq.heappush(self._due, (moment, self._count, make))

    @contextmanager
    def _apart(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.own += time.thread_time() - began


def _pickled(order: WorkOrder) -> bytes:
    return pickle.dumps(order)


def _begin(attempt: Attempt, start: AttemptStart) -> Event:
    return attempt, start


def _end(attempt: Attempt, spec: StageSpec, seconds: float, started: float) -> Event:
    return attempt, replace(make_record(spec, seconds, started), host=f"node-{attempt.segment % 1000}")


def _return(attempt: Attempt) -> Event:
    return attempt, None


class SimulatedExecutor(RayExecutor):
    """The executor on Ray with simulated nodes and tasks."""

    def __init__(self, store: Store, tasks: SimulatedTasks, nodes: int, slots: int, **options: Any) -> None:
        super().__init__(Cluster(), store, **options)
        self._simulated = tasks
        names = [f"node-{number}" for number in range(nodes)]
        self._there = [Node(name, name, True, {"CPU": float(slots), "memory": 64e9}) for name in names]

    def start(self) -> None:
        """Do nothing: there is no Ray."""

    def _watching(self) -> Watch:
        return Watch(self.cluster, self._wanted, lambda: self._there)

    def _tasks(self, wanted: dict[str, float] | None = None) -> Any:
        del wanted
        return self._simulated


@dataclass(frozen=True)
class ViewCost:
    """CPU seconds and memory of the state of a view, and the number of contents that it made."""

    seconds: float
    peak_mb: float
    contents: int


class StateWriter:
    """The process of a view without MLflow: it keeps the state and makes the content of each run, once it is whole.

    Args:
        requests: queue of requests
        say: not called
        wrote: called after each content, as a sign of life
        note: file for its `ViewCost`
    """

    def __init__(
        self, requests: Requests, say: Callable[[str], None], wrote: Callable[[int], None], *, note: Path
    ) -> None:
        del say
        self._requests, self._wrote, self._note = requests, wrote, note

    def write(self) -> None:
        """Handle requests until the view is finished."""
        view, contents, began = None, 0, 0.0
        while (request := self._requests.get())[0] != "finish":
            began = began or time.process_time()
            if request[0] == "start":
                view = SweepView(*request[1:])
                view.opening()
            elif view is not None:
                for index in view.take(request[1]):
                    if len(view.chain(index)) == len(view.plan.trials[index].stages):
                        contents += view.content(index) is not None
                        self._wrote(0)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        self._note.write_bytes(pickle.dumps(ViewCost(time.process_time() - began, peak, contents)))
