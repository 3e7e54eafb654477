"""Executor on Ray.

Each attempt at a segment is one streaming-generator task. It yields where it runs, then a record for each stage as it
becomes durable, or a failure. Ray itself retries nothing. Weights never pass through Ray: children read them from the
store.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from orchestrator.config.cluster import Cluster, grace
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import ParallelFields, Plan, StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import (
    Attempt,
    Passed,
    Preflight,
    Seat,
    Worker,
    WorkOrder,
    unheard,
)
from orchestrator.execution.dispatch import Dispatcher
from orchestrator.execution.executor import Executor
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.interrupts import SENT_TO_ALL
from orchestrator.execution.on_ray import embedded_ray
from orchestrator.execution.on_ray.embedded_ray import Address, ClusterError, address_of
from orchestrator.execution.on_ray.rank_tasks import seat_of
from orchestrator.execution.on_ray.ray_tasks import Outdated, Tasks
from orchestrator.execution.perform import PREFLIGHT, failure_of
from orchestrator.execution.placement import Node, Watch, refusal, request, share_of, slots


def executor_of(cluster: Cluster) -> type[RayExecutor] | type[InlineExecutor]:
    """Return the executor that `cluster.kind` names."""
    return InlineExecutor if cluster.kind == "inline" else RayExecutor


class RayExecutor(Executor):
    """Runs a plan on the workers of a Ray cluster; by default the cluster lives as long as the executor.

    `watch` hears of stages that run longer than a second.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self._apart = self.processes if self.cluster.placement == "spread" else 1
        self._grace = grace(self.cluster.grace)
        self._address, self._wanted = address_of(self.cluster), request(self.cluster)
        self._lock = threading.Lock()
        self._closed = threading.Event()  # to be set after Ray has been shut down
        self._connected: Future[bool] | None = None
        self._check: Callable[[], object] | None = None

    def prestart(self) -> None:
        """Begin to start or join Ray in the background, and return at once."""
        with self._lock:
            if self._connected is None:
                self._connected, self._closed = Future(), threading.Event()
                threading.Thread(target=self._hold, args=(self._connected,), name="ray", daemon=True).start()

    def start(self) -> None:
        """Start or join Ray.

        Raises:
            ClusterError: there is no such cluster, it refuses us, or none of its nodes can run a trial
        """
        self.prestart()
        assert self._connected is not None
        self._connected.result()
        alive = [node.resources for node in _nodes() if node.alive]
        reason = refusal(self._wanted, alive, self._apart, self.processes)
        if reason is not None and not self.cluster.autoscaling:
            raise ClusterError(reason)

    def run(self, plan: Plan) -> Iterator[StageEvent]:
        """Run every stage of `plan` (parents outside the plan are in the store) and yield events as they happen.

        Raises:
            ClusterError: as `start`
            OrchestratorError: no node is left that can run a trial; unfinished stages were killed
        """
        self.start()
        dispatcher = self.dispatcher(plan)
        tasks: Tasks[StageRecord] = self._tasks()
        watch = self._watching()
        try:
            while not dispatcher.done:
                if self.cancelled.is_set() and not dispatcher.stopping:
                    yield from dispatcher.stop()
                if watch.look():
                    yield from self._leave_dead_nodes(dispatcher, tasks, watch)
                if dispatcher.stopping:
                    yield from self._end(dispatcher, tasks)
                else:
                    if self.cluster.stage_timeout is not None:
                        tasks.end_late(self.cluster.stage_timeout + self._grace)  # stages end by themselves before
                    self._hand_out(dispatcher, tasks, watch.capacity)
                    yield from dispatcher.news()
                    for point in tasks.points() if self.watch is not unheard else ():
                        self.watch(*point)
                full = len(tasks) >= watch.capacity  # then a due retry has to wait, too
                for attempt, item in tasks.receive(timeout=0.2 if full else min(0.2, dispatcher.delay())):
                    if isinstance(item, Outdated):
                        tasks.submit(attempt, self._order(attempt), self.work, fresh=True)
                    else:
                        yield from dispatcher.take(attempt, item)
        finally:
            tasks.end(self._grace)
        if watch.hopeless:
            raise OrchestratorError(watch.hopeless)

    def preflight(
        self, stages: Sequence[tuple[StageSpec, ...]], work: Preflight | str = PREFLIGHT
    ) -> Iterator[tuple[int, Passed | Failure]]:
        """Rehearse the last of each group of `stages`, below its lineage, on a worker; yield its index and outcome.

        A stage whose node dies has no outcome.
        """
        self.start()
        tasks: Tasks[Passed] = self._tasks(share_of(self._wanted, self.processes))
        watch = self._watching()
        try:
            for index, (*lineage, spec) in enumerate(stages):
                attempt = Attempt(index, 1, (spec,), tuple(lineage))
                tasks.submit(attempt, self._order(attempt, "preflight-"), work)
            while len(tasks) and not watch.hopeless:
                if watch.look():
                    tasks.drop(watch.dead)
                for attempt, item in tasks.receive(timeout=0.2):
                    if isinstance(item, Outdated):
                        tasks.submit(attempt, self._order(attempt, "preflight-"), work, fresh=True)
                    elif isinstance(item, Passed | Failure):
                        yield attempt.segment, item
        finally:
            tasks.end(self._grace)

    def on_every_node(self, check: Callable[[], object], timeout: float = 60.0) -> None:
        """Call `check` on each node that can run a trial, to find problems of a node before a trial runs there.

        A node that joins later is checked before its first trial, which fails if the check raises.

        Raises:
            ClusterError: the check raised on a node, or a node did not answer in `timeout` seconds; names each reason
        """
        self.start()
        self._check = check
        reasons = [_reason(check)] if self._address.own else self._reasons(check, timeout)
        if any(reasons):
            raise ClusterError("\n".join(dict.fromkeys(filter(None, reasons))))

    def _reasons(self, check: Callable[[], object], timeout: float) -> list[str | None]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        share = share_of(self._wanted, self._apart)
        nodes = [node for node in _nodes() if node.alive and slots(share, [node.resources])]
        answers = []
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here}
            options |= _runtime_env(self._address, self.cluster)
            answers.append(ray.remote(**options)(_reason).remote(check))
        reasons: list[str | None] = []
        for node, answer in zip(nodes, answers, strict=True):
            try:
                reasons.append(ray.get(answer, timeout=timeout))
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines()[-1]  # the last line of a traceback names the exception
                reasons.append(f"node {node.host} could not be checked: {said}")
        return reasons

    def close(self) -> None:
        """Leave the cluster; the sweep's own Ray ends with all its processes."""
        with self._lock:
            connected, self._connected = self._connected, None
        if connected is not None and connected.exception() is None and connected.result():
            embedded_ray.leave(own=self._address.own)
        self._closed.set()

    def _hold(self, connected: Future[bool]) -> None:
        """Connect to Ray and wait until `close`: the kernel kills Ray's processes when the starting thread ends."""
        signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_ALL)  # inherited by Ray's processes; Ray blocks only SIGINT
        try:
            with embedded_ray.connected(self._address, self.cluster, self.work) as new:
                connected.set_result(new)
                self._closed.wait()
        except BaseException as error:
            connected.set_exception(error)

    def _hand_out(self, dispatcher: Dispatcher, tasks: Tasks[StageRecord], capacity: int) -> None:
        """Submit attempts up to `capacity`, so that no worker waits for the driver."""
        while len(tasks) < capacity and (attempt := dispatcher.next()) is not None:
            tasks.submit(attempt, self._order(attempt), self.work)

    def _order(self, attempt: Attempt, what: str = "") -> WorkOrder:
        worker = Worker(
            store=self.store,
            threads=self.cluster.threads_of(_parallel(attempt).processes),
            seat=None if what else self._seat(attempt),
            grace=self._grace,
            stage_timeout=self.cluster.stage_timeout,
            log=self.log(f"{what}{attempt.specs[0].key[:12]}.{attempt.number}"),
            check=self._check,
        )
        return WorkOrder(attempt.specs, worker, attempt.lineage, attempt.number)

    def _seat(self, attempt: Attempt) -> Seat | None:
        """Return the seat of rank 0, if several processes train the stages of an attempt."""
        parallel = _parallel(attempt)
        if parallel.processes == 1 or not KINDS[attempt.specs[0].kind].trains:
            return None
        return seat_of(parallel.processes, parallel.sync_batch_norm, self.cluster.stage_timeout)

    def _watching(self) -> Watch:
        died = embedded_ray.death if self._address.own else lambda: None
        return Watch(self.cluster, self._wanted, _nodes, died=died, processes=self._apart)

    def _tasks(self, wanted: dict[str, float] | None = None) -> Tasks[Any]:
        return Tasks(self.cluster, wanted or self._wanted, _runtime_env(self._address, self.cluster))

    def _leave_dead_nodes(
        self, dispatcher: Dispatcher, tasks: Tasks[StageRecord], watch: Watch
    ) -> Iterator[StageEvent]:
        for attempt in tasks.drop(watch.dead):
            yield from dispatcher.take(attempt, Failure("the node died", transient=True))
        if watch.hopeless and not dispatcher.stopping:
            yield from dispatcher.stop(Failure(watch.hopeless))

    def _end(self, dispatcher: Dispatcher, tasks: Tasks[StageRecord]) -> Iterator[StageEvent]:
        """Ask running stages to end at a batch, kill them after the grace period, then abandon those left."""
        waited = tasks.cancel(force=False)
        if waited > self._grace:
            tasks.cancel(force=True)
        if waited > 2 * self._grace + 1:
            for attempt in tasks.drop():
                yield from dispatcher.ended(attempt)


def _parallel(attempt: Attempt) -> ParallelFields:
    """Return the processes of an attempt's trainings, as its dense training has them."""
    return (*attempt.lineage, *attempt.specs)[0].typed.parallel


def _reason(check: Callable[[], object]) -> str | None:
    """Return why a check fails on this node; None if it passes."""
    try:
        check()
    except Exception as error:
        return failure_of(error).message
    return None


def _runtime_env(address: Address, cluster: Cluster) -> dict[str, Any]:
    """Return the option that sets the workers' environment variables; the sweep's own Ray starts with them."""
    return {} if address.own else {"runtime_env": {"env_vars": embedded_ray.of_workers(cluster.thread_count)}}


def _nodes() -> list[Node]:
    import ray

    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [Node(node["NodeID"], node["NodeManagerHostname"], node["Alive"], node["Resources"]) for node in found]
