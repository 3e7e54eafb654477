"""The executor on Ray, and the only module that imports ray.

Each attempt at a segment is one streaming-generator task: it yields where it runs, then a record for each stage that
is durable, or a failure. Ray itself retries nothing. Weights never travel: children read them from the store.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from orchestrator.config.cluster import Cluster
from orchestrator.core.canonical import canonical_json, digest
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure, StageEvent
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.work_order import AttemptStart, StageStore, Work, WorkOrder
from orchestrator.execution import embedded_ray
from orchestrator.execution.address import Address, ClusterError, address_of
from orchestrator.execution.dispatch import Attempt, Claims, Dispatcher
from orchestrator.execution.inline import InlineExecutor
from orchestrator.execution.output_capture import captured_output, interrupt_flag
from orchestrator.execution.own_modules import ProcessOutdated, hold_planned, modules_of
from orchestrator.execution.perform import DEFAULT_WORK, failure_of, perform
from orchestrator.execution.placement import Node, Watch, cuda_device, refusal, request, slots

if TYPE_CHECKING:
    from ray import ObjectRefGenerator

OBJECT_STORE = 128 * 2**20
"""Bytes of the object store of a Ray of our own: nothing but records passes through it."""


def make_executor(
    cluster: Cluster,
    store: StageStore,
    *,
    work: Work | str = DEFAULT_WORK,
    logs: str | Path = "logs",
    claims: Claims | None = None,
) -> RayExecutor | InlineExecutor:
    """Return the executor that `cluster.kind` names; enter it to start it, leave it to end it."""
    if cluster.kind == "inline":
        return InlineExecutor(cluster, store, work=work, claims=claims)
    return RayExecutor(cluster, store, work=work, logs=logs, claims=claims)


class RayExecutor:
    """Runs a plan on the workers of a Ray cluster, by default one that lives as long as the executor.

    Args:
        cluster: what a sweep may use
        store: where finished stages are durable, for every node
        work: what runs a segment, or its `module:name`; every node must be able to import it
        logs: the folder on each worker for what the work prints, one file an attempt
        claims: of the drivers that share the store, if there may be others
        grace: seconds that running stages have to end at a batch once the sweep is cancelled
    """

    def __init__(
        self,
        cluster: Cluster,
        store: StageStore,
        *,
        work: Work | str = DEFAULT_WORK,
        logs: str | Path = "logs",
        claims: Claims | None = None,
        grace: float = 2.0,
    ) -> None:
        self._cluster, self._store, self._work, self._claims = cluster, store, work, claims
        self._logs, self._grace = Path(logs).absolute(), grace
        self._address, self._wanted = address_of(cluster), request(cluster)
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._closed = threading.Event()  # to be set after Ray has been shut down
        self._connected: Future[bool] | None = None
        self._check: Callable[[], object] | None = None

    def prestart(self) -> None:
        """Begin to start or join Ray and return at once, so that other things start meanwhile."""
        with self._lock:
            if self._connected is None:
                self._connected, self._closed = Future(), threading.Event()
                threading.Thread(target=self._hold, args=(self._connected,), name="ray", daemon=True).start()

    def start(self) -> None:
        """Start or join Ray.

        Raises:
            ClusterError: there is no such cluster, it refuses us, or no node of it can run a trial
        """
        self.prestart()
        assert self._connected is not None
        self._connected.result()
        reason = refusal(self._wanted, [node.resources for node in _nodes() if node.alive])
        if reason is not None and not self._cluster.autoscaling:
            raise ClusterError(reason)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, plan: Plan) -> Iterator[StageEvent]:
        """Run every stage of `plan` (parents outside it are in the store) and yield what happens, as it happens.

        Raises:
            ClusterError: as `start`
            OrchestratorError: no node that can run a trial is left; all that did not finish was killed
        """
        self.start()
        dispatcher = Dispatcher(plan, self._cluster, self._store.finished, claims=self._claims)
        tasks = Tasks(self._cluster, self._wanted, _runtime_env(self._address, self._cluster))
        watch = Watch(self._cluster, self._wanted, _nodes)
        try:
            while not dispatcher.done:
                if self._cancelled.is_set() and not dispatcher.stopping:
                    yield from dispatcher.stop()
                if watch.look():
                    yield from self._leave_dead_nodes(dispatcher, tasks, watch)
                if dispatcher.stopping:
                    yield from self._end(dispatcher, tasks)
                else:
                    self._hand_out(dispatcher, tasks, watch.capacity)
                    yield from dispatcher.news()
                for attempt, item in tasks.receive(timeout=min(0.2, dispatcher.delay())):
                    if isinstance(item, Outdated):
                        tasks.submit(attempt, self._order(attempt), self._work, fresh=True)
                    else:
                        yield from dispatcher.take(attempt, item)
        finally:
            tasks.end(self._grace)
        if watch.hopeless:
            raise OrchestratorError(watch.hopeless)

    def cancel(self) -> None:
        """Hand out nothing more and end running stages at their next batch; `run` then yields `killed` and returns."""
        self._cancelled.set()

    def on_every_node(self, check: Callable[[], object], timeout: float = 60.0) -> None:
        """Call `check` on each node that can run a trial, so that what is missing there is said before any does.

        A node that joins later is checked before it runs its first one, which fails if that raises.

        Raises:
            ClusterError: what the check raised, node by node, or that a node did not answer in `timeout` seconds
        """
        self.start()
        self._check = check
        reasons = [_reason(check)] if self._address.own else self._reasons(check, timeout)
        if any(reasons):
            raise ClusterError("\n".join(dict.fromkeys(filter(None, reasons))))

    def _reasons(self, check: Callable[[], object], timeout: float) -> list[str | None]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        nodes = [node for node in _nodes() if node.alive and slots(self._wanted, [node.resources])]
        answers = []
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node.id, soft=False)
            options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": here}
            options |= _runtime_env(self._address, self._cluster)
            answers.append(ray.remote(**options)(_reason).remote(check))
        reasons: list[str | None] = []
        for node, answer in zip(nodes, answers, strict=True):
            try:
                reasons.append(ray.get(answer, timeout=timeout))
            except ray.exceptions.RayError as error:
                said = str(error).strip().splitlines()[-1]  # the exception itself, where it is one of Python's
                reasons.append(f"node {node.host} could not be asked: {said}")
        return reasons

    def close(self) -> None:
        """Leave the cluster; one of our own ends with all its processes."""
        with self._lock:
            connected, self._connected = self._connected, None
        if connected is not None and connected.exception() is None and connected.result():
            import ray

            ray.shutdown()
        self._closed.set()

    def _hold(self, connected: Future[bool]) -> None:
        """Connect, and live as long as Ray shall: the kernel ends its processes with the thread that started them."""
        try:
            connected.set_result(_connect(self._address, self._cluster, self._work))
        except BaseException as error:
            connected.set_exception(error)
        else:
            self._closed.wait()

    def _hand_out(self, dispatcher: Dispatcher, tasks: Tasks, capacity: int) -> None:
        """Keep Ray supplied, so that no worker waits for us, yet never with more than `capacity`."""
        while len(tasks) < capacity and (attempt := dispatcher.next()) is not None:
            tasks.submit(attempt, self._order(attempt), self._work)

    def _order(self, attempt: Attempt) -> WorkOrder:
        return WorkOrder(
            specs=attempt.specs,
            lineage=attempt.lineage,
            store=self._store,
            threads=self._cluster.thread_count,
            attempt=attempt.number,
            log=str(self._logs / f"{attempt.specs[0].key[:12]}.{attempt.number}.log"),
            check=self._check,
        )

    def _leave_dead_nodes(self, dispatcher: Dispatcher, tasks: Tasks, watch: Watch) -> Iterator[StageEvent]:
        for attempt in tasks.drop(watch.dead):
            yield from dispatcher.take(attempt, Failure("the node died", transient=True))
        if watch.hopeless and not dispatcher.stopping:
            yield from dispatcher.stop(Failure(watch.hopeless))

    def _end(self, dispatcher: Dispatcher, tasks: Tasks) -> Iterator[StageEvent]:
        """Ask running stages to end at a batch, end them by force after the grace, then leave what does not answer."""
        waited = tasks.cancel(force=False)
        if waited > self._grace:
            tasks.cancel(force=True)
        if waited > 2 * self._grace + 1:
            for attempt in tasks.drop():
                yield from dispatcher.ended(attempt)


@dataclass(frozen=True)
class Outdated:
    """Says instead of anything else that a worker has imported older sources: a fresh process shall do the work."""


class Tasks:
    """The attempts that Ray has been given, each a stream of items."""

    def __init__(self, cluster: Cluster, wanted: dict[str, float], runtime_env: dict[str, Any]) -> None:
        import ray

        special = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU", "memory")}
        options: dict[str, Any] = {
            "num_cpus": wanted["CPU"],
            "num_gpus": wanted.get("GPU", 0),
            "resources": special,
            "scheduling_strategy": "SPREAD" if cluster.placement == "spread" else "DEFAULT",
            "num_returns": "streaming",
            "max_retries": 0,
            "max_calls": 0,  # workers are reused on GPUs too: a new process each costs seconds
            **runtime_env,
        }
        if "memory" in wanted:
            options["memory"] = int(wanted["memory"])
        self._function = ray.remote(**options)(_run)
        self._variables: dict[str, str] = runtime_env.get("runtime_env", {}).get("env_vars", {})
        self._running: dict[ObjectRefGenerator, Attempt] = {}
        self._cancelled: dict[bool, float] = {}

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, attempt: Attempt, order: WorkOrder, work: Work | str, *, fresh: bool = False) -> None:
        """Give Ray one attempt; a `fresh` one for a process that has worked with no other version of its sources."""
        options: dict[str, Any] = {"name": f"segment {order.specs[0].key[:12]}"}
        if fresh:  # Ray has processes of their own for each environment
            mark = {"PRUNING_SOURCES": digest(canonical_json(modules_of(order.specs)))}
            options["runtime_env"] = {"env_vars": self._variables | mark}
        generator = self._function.options(**options).remote(order, work)
        self._running[generator] = attempt

    def receive(self, timeout: float) -> Iterator[tuple[Attempt, Item | None]]:
        """Yield what has arrived, at most one item a task, waiting for the first; None says that a task has ended.

        A cancelled task gives no items any more, and its stream ends before it does.
        """
        import ray

        if not self._running:
            time.sleep(timeout)
            return
        if self._cancelled:
            ends = {generator.completed(): generator for generator in self._running}
            for end in ray.wait(list(ends), num_returns=1, timeout=timeout)[0]:
                yield self._running.pop(ends[end]), None
            return
        waiting = list(self._running)
        ready, _ = ray.wait(waiting, timeout=timeout)
        if ready and len(waiting) > 1:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for generator in ready:
            item, attempt = _next(generator), self._running[generator]
            if item is None or isinstance(item, Failure | Outdated):
                del self._running[generator]
            yield attempt, item

    def cancel(self, *, force: bool) -> float:
        """Cancel every task that has a stage left, once; return the seconds since then.

        The others are about to end: Ray aborts this process where a task that it cancels ends at that moment.
        """
        import ray

        if force not in self._cancelled:
            self._cancelled[force] = time.monotonic()
            for generator, attempt in self._running.items():
                if attempt.left:
                    ray.cancel(generator, force=force)
        return time.monotonic() - self._cancelled[force]

    def end(self, patience: float) -> None:
        """End what still runs by force, and wait, so many seconds at most, for what is about to end by itself."""
        self.cancel(force=True)
        self._running = {generator: attempt for generator, attempt in self._running.items() if not attempt.left}
        deadline = time.monotonic() + patience
        while self._running and time.monotonic() < deadline:
            for _ in self.receive(timeout=0.1):
                pass

    def drop(self, nodes: Collection[str] | None = None) -> list[Attempt]:
        """Return the attempts, of these nodes only if given, and hear no more of them."""
        chosen = {
            generator: attempt
            for generator, attempt in self._running.items()
            if nodes is None or (attempt.start is not None and attempt.start.node in nodes)
        }
        for generator in chosen:
            del self._running[generator]
        return list(chosen.values())


Item = AttemptStart | StageRecord | Failure | Outdated


def _run(order: WorkOrder, work: Work | str) -> Iterator[Item]:
    """Perform an order in a worker: the body of a Ray task."""
    import ray

    try:
        hold_planned(order.specs)
    except ProcessOutdated:
        yield Outdated()
        return
    except OrchestratorError:
        pass  # performing the order will say so
    device = cuda_device(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    with interrupt_flag() as cancelled, captured_output(order.log) as log:
        yield AttemptStart(socket.gethostname(), ray.get_runtime_context().get_node_id(), log, time.time())
        yield from perform(replace(order, device=device, cancelled=cancelled, log=log), work)
        if device != "cpu" and "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()  # the next worker on this GPU may need what we cached


def _reason(check: Callable[[], object]) -> str | None:
    """Return why a check fails on this node, None if it does not."""
    try:
        check()
    except Exception as error:
        return failure_of(error).message
    return None


def _next(generator: ObjectRefGenerator) -> Item | None:
    """Return the next item of a task, an error of Ray's own as a failure, None at the end."""
    import ray
    from ray import exceptions

    try:
        item: Item = ray.get(next(generator))
        return item
    except StopIteration:
        return None
    except exceptions.TaskCancelledError:
        return Failure("the task was cancelled from outside of the sweep", transient=True)
    except exceptions.RayTaskError as error:  # before the work began: it could not be imported there, say
        text = str(error).strip()
        return Failure(f"the worker could not begin: {text.splitlines()[-1]}", traceback=text)
    except (exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
        return Failure(f"no worker could be started: {error}")
    except exceptions.WorkerCrashedError:
        return Failure("the worker process died: killed, out of memory, or a crash in native code", transient=True)
    except exceptions.RayError as error:  # NodeDiedError, OutOfMemoryError, a lost record
        return Failure(f"the worker was lost: {str(error).strip().splitlines()[0].partition('. ')[0]}", transient=True)


def _runtime_env(address: Address, cluster: Cluster) -> dict[str, Any]:
    """Return the option that gives workers their environment; those of our own Ray have it from the start."""
    return {} if address.own else {"runtime_env": {"env_vars": embedded_ray.of_workers(cluster.thread_count)}}


def _nodes() -> list[Node]:
    import ray

    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return [Node(node["NodeID"], node["NodeManagerHostname"], node["Alive"], node["Resources"]) for node in found]


def _connect(address: Address, cluster: Cluster, work: Work | str) -> bool:
    """Connect to Ray unless this process is; return whether it did."""
    address.reach()
    logging.getLogger("ray").setLevel(logging.ERROR)
    if address.own:
        os.environ.update(embedded_ray.lasting())
    with embedded_ray.environment(
        embedded_ray.while_starting(cluster.thread_count) if address.own else embedded_ray.ALWAYS
    ):
        import ray

        if ray.is_initialized():
            return False
        options: dict[str, Any] = {"address": address.value, "log_to_driver": False, "logging_level": logging.ERROR}
        if address.own:
            options |= {
                "num_cpus": cluster.num_cpus,
                "include_dashboard": cluster.dashboard,
                "object_store_memory": OBJECT_STORE,
                "_system_config": {"preload_python_modules": _preloaded(work)},
            }
        try:
            ray.init(**options)
        except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            raise address.refused(error) from error
    return True


def _preloaded(work: Work | str) -> list[str]:
    """Return the modules that workers import while nothing else can be done yet."""
    if work == DEFAULT_WORK:
        return ["orchestrator.training.preload"]
    return [work.partition(":")[0]] if isinstance(work, str) else []
