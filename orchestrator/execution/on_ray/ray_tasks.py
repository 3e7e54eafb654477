"""Ray tasks: attempts as streaming-generator tasks, and the function that runs in the workers."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic

from orchestrator.config.cluster import Cluster
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure
from orchestrator.core.metrics import Metric
from orchestrator.core.plain_data import canonical_json, digest, parse_json, read_as
from orchestrator.core.records import CurvePoint
from orchestrator.core.work_order import Attempt, AttemptStart, Item, Report, Seat, WorkOrder
from orchestrator.execution.interrupts import SENT_TO_ALL
from orchestrator.execution.on_ray import rank_tasks
from orchestrator.execution.output_capture import captured_output, interrupt_flag
from orchestrator.execution.own_modules import ProcessOutdated, hold_planned, modules_of
from orchestrator.execution.perform import perform
from orchestrator.execution.placement import cuda_device, share_of

if TYPE_CHECKING:
    from ray import ObjectRefGenerator


POINTS_EVERY = 1.0
"""Seconds between two points that a task sends to the driver, and before the first; a short stage sends none."""
WATCHED = 12
"""Maximum number of tasks polled for live points: more are not shown, and each costs a request."""
POINTS = "pruning-orchestrator/points"
"""Namespace of Ray's key-value store that holds the last point of each stage."""


@dataclass(frozen=True)
class Outdated:
    """Sent by a worker that has imported older sources, instead of any other item; a fresh process does the work."""


class Tasks(Generic[Item]):
    """Attempts that were submitted to Ray, each a stream of items."""

    def __init__(self, cluster: Cluster, wanted: dict[str, float], runtime_env: dict[str, Any]) -> None:
        import ray

        options: dict[str, Any] = {
            **_amounts(wanted),
            "scheduling_strategy": "SPREAD" if cluster.placement == "spread" else "DEFAULT",
            "num_returns": "streaming",
            "max_retries": 0,
            "max_calls": 0,  # workers are reused on GPUs too: a new process each costs seconds
            **runtime_env,
        }
        body: Any = _run  # generic, which ray's types are not
        self._function: Any = ray.remote(**options)(body)
        self._follower: Any = ray.remote(**{**options, "num_returns": 1})(_follow)
        self._wanted, self._one_node = wanted, cluster.placement == "pack"
        self._teams: dict[ObjectRefGenerator, rank_tasks.Team] = {}
        """Processes of the trials of several."""
        self._variables: dict[str, str] = runtime_env.get("runtime_env", {}).get("env_vars", {})
        self._running: dict[ObjectRefGenerator, Attempt] = {}
        self._cancelled: dict[bool, float] = {}
        self._since: dict[ObjectRefGenerator, float] = {}
        """When the stage began that each task runs now."""
        self._looked = self._looked_at_ranks = -math.inf
        self._late: set[ObjectRefGenerator] = set()
        """Tasks that were ended by force, for their stage took too long."""

    def __len__(self) -> int:
        return len(self._running)

    def submit(
        self,
        attempt: Attempt,
        order: WorkOrder,
        work: Callable[[WorkOrder], Iterator[Item]] | str,
        *,
        fresh: bool = False,
    ) -> None:
        """Submit an attempt; `fresh` asks for a process that has imported no other version of its sources."""
        options: dict[str, Any] = {"name": f"segment {order.specs[0].key[:12]}"}
        if marks := _marks(order, fresh=fresh):
            options["runtime_env"] = {"env_vars": self._variables | marks}
        if (seat := order.worker.seat) is not None:
            generator = self._submit_ranks(order, seat, work, options)
        else:
            generator = self._function.options(**options).remote(order, work)
        self._running[generator] = attempt

    def _submit_ranks(
        self, order: WorkOrder, seat: Seat, work: Callable[[WorkOrder], Iterator[Item]] | str, options: dict[str, Any]
    ) -> ObjectRefGenerator:
        """Submit the processes of a trial; return the stream of rank 0."""
        share = share_of(self._wanted, seat.size)
        team, own = rank_tasks.placed(share, seat.size, one_node=self._one_node), {**_amounts(share), **options}
        generator: ObjectRefGenerator = self._function.options(**own, **team.option(0)).remote(order, work)
        team.log = log = order.worker.log
        team.followers = [
            self._follower.options(**own | {"name": f"rank {rank} of {own['name']}"}, **team.option(rank)).remote(
                order.done_by(seat=replace(seat, rank=rank), log=rank_tasks.log_of(log, rank))
            )
            for rank in range(1, seat.size)
        ]
        self._teams[generator] = team
        return generator

    def _dismiss(self, generator: ObjectRefGenerator) -> None:
        """End the other processes of a trial that has ended."""
        if (team := self._teams.pop(generator, None)) is not None:
            with suppress(Exception):  # Ray is gone
                team.dismiss()

    def receive(self, timeout: float) -> Iterator[tuple[Attempt, AttemptStart | Item | Failure | Outdated | None]]:
        """Wait for items and yield those that have arrived, at most one for each task; None means the task has ended.

        A cancelled task yields no more items, and its stream ends before the task does.
        """
        import ray

        if not self._running:
            time.sleep(timeout)
            return
        if self._cancelled:
            ends = {generator.completed(): generator for generator in self._running}
            for end in ray.wait(list(ends), num_returns=1, timeout=timeout)[0]:
                self._dismiss(ends[end])
                yield self._running.pop(ends[end]), None
            return
        yield from self._lost()
        waiting = list(self._running)
        ready, _ = ray.wait(waiting, timeout=timeout) if waiting else ([], [])
        if ready and len(waiting) > 1:
            ready, _ = ray.wait(waiting, num_returns=len(waiting), timeout=0)
        for generator in ready:
            item, attempt = _next(generator), self._running[generator]
            self._since[generator] = time.monotonic()
            if generator in self._late and (item is None or isinstance(item, Failure)):
                item = Failure("it hung, and took longer than `cluster.stage_timeout`", transient=True)
            elif isinstance(item, Failure) and generator in self._teams:
                item = self._teams[generator].blamed(item)
            elif isinstance(item, AttemptStart) and generator in self._teams:
                self._teams[generator].begun()
            if item is None or isinstance(item, Failure | Outdated):
                self._leave(generator)
            yield attempt, item

    def _lost(self) -> Iterator[tuple[Attempt, Failure]]:
        """Yield the attempts that lost a rank while rank 0 has not noticed it; looks at most once a second."""
        if time.monotonic() - self._looked_at_ranks < POINTS_EVERY:
            return
        self._looked_at_ranks = time.monotonic()
        for generator in [generator for generator in self._teams if generator in self._running]:
            if (failure := self._teams[generator].lost()) is not None:
                attempt = self._running[generator]
                self._leave(generator)
                yield attempt, failure

    def _leave(self, generator: ObjectRefGenerator) -> None:
        """Forget a task that has ended, and end the other processes of its trial."""
        self._dismiss(generator)
        del self._running[generator]
        self._since.pop(generator, None)
        self._late.discard(generator)

    def points(self) -> Iterator[tuple[str, CurvePoint, Metric]]:
        """Yield the new points of running stages as (key, point, metric); at most once a second."""
        from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get

        if time.monotonic() - self._looked < POINTS_EVERY:
            return
        self._looked = time.monotonic()
        points: list[tuple[str, CurvePoint, Metric]] = []
        for key in [key for attempt in islice(self._running.values(), WATCHED) for key in attempt.left[:1]]:
            with suppress(Exception):  # a problem of the display must not fail the sweep
                found: bytes | None = _internal_kv_get(key, namespace=POINTS)
                _internal_kv_del(key, namespace=POINTS)
                if found is not None:
                    point, metric = _point_from(found)
                    points.append((key, point, metric))
        yield from points

    def end_late(self, limit: float) -> None:
        """Kill the tasks whose stage takes longer than `limit` seconds."""
        import ray

        for generator in self._running.keys() - self._late:
            if time.monotonic() - self._since.get(generator, math.inf) > limit:
                self._late.add(generator)
                ray.cancel(generator, force=True)  # with force at once, as Ray ignores a second cancel

    def cancel(self, *, force: bool) -> float:
        """Cancel every task that has a stage left; return the seconds since the first call with this `force`.

        Tasks without stages left are about to end and are not cancelled: Ray aborts this process if a task ends at the
        moment it is cancelled.
        """
        import ray

        if force not in self._cancelled:
            self._cancelled[force] = time.monotonic()
            for generator, attempt in self._running.items():
                if attempt.left:
                    ray.cancel(generator, force=force)
        return time.monotonic() - self._cancelled[force]

    def end(self, patience: float) -> None:
        """Kill the tasks that still run, and wait up to `patience` seconds for those that are about to end."""
        self.cancel(force=True)
        self._running = {generator: attempt for generator, attempt in self._running.items() if not attempt.left}
        for generator in [each for each in self._teams if each not in self._running]:
            self._dismiss(generator)
        deadline = time.monotonic() + patience
        while self._running and time.monotonic() < deadline:
            for _ in self.receive(timeout=0.1):
                pass

    def drop(self, nodes: Collection[str] | None = None) -> list[Attempt]:
        """Remove the attempts, only those on `nodes` if given, and return them; their items are ignored from now on."""
        chosen = {
            generator: attempt
            for generator, attempt in self._running.items()
            if nodes is None or not self._nodes_of(generator).isdisjoint(nodes)
        }
        for generator in chosen:
            self._leave(generator)
        return list(chosen.values())

    def _nodes_of(self, generator: ObjectRefGenerator) -> frozenset[str]:
        """Return the nodes that work on an attempt; none before it has begun."""
        start, team = self._running[generator].start, self._teams.get(generator)
        return frozenset([start.node] if start is not None else []) | (team.nodes if team is not None else frozenset())


def _marks(order: WorkOrder, *, fresh: bool) -> dict[str, str]:
    """Return variables that keep work out of the processes of other work: Ray never shares one between environments.

    Processes of a training function are new, because libraries remember the rank of a process.
    """
    found = {"PRUNING_SOURCES": digest(canonical_json(modules_of(order.specs)))} if fresh else {}
    seat = order.worker.seat
    if seat is not None and any(spec.training_config.get("_target_") for spec in order.specs):
        found["PRUNING_RANKS"] = seat.meeting
    return found


def _amounts(wanted: Mapping[str, float]) -> dict[str, Any]:
    """Return the options of a task that takes some resources."""
    special = {name: amount for name, amount in wanted.items() if name not in ("CPU", "GPU", "memory")}
    found = {"num_cpus": wanted["CPU"], "num_gpus": wanted.get("GPU", 0), "resources": special}
    return found | ({"memory": int(wanted["memory"])} if "memory" in wanted else {})


def _run(
    order: WorkOrder, work: Callable[[WorkOrder], Iterator[Item]] | str
) -> Iterator[AttemptStart | Item | Failure | Outdated]:
    """Perform a work order in a worker; this is the function of a Ray task."""
    import ray

    # Processes that the user's code starts would inherit the blocked signals.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)
    try:
        hold_planned(order.specs)
    except ProcessOutdated:
        yield Outdated()
        return
    except OrchestratorError:
        pass  # `perform` yields the failure
    device = cuda_device(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    with interrupt_flag() as cancelled, captured_output(order.worker.log) as log, _reporting() as report:
        yield AttemptStart(socket.gethostname(), ray.get_runtime_context().get_node_id(), log, time.time())
        done = work if order.worker.seat is None else partial(rank_tasks.in_ranks, work)
        yield from perform(order.done_by(device=device, cancelled=cancelled, log=log, report=report), done)
        if device != "cpu" and "torch" in sys.modules:
            sys.modules["torch"].cuda.empty_cache()  # the next worker on this GPU may need this memory


def _follow(order: WorkOrder) -> Failure | None:
    """Take part in the trainings of rank 0, in a worker; return why this rank failed, None if it did not."""
    import ray

    signal.pthread_sigmask(signal.SIG_UNBLOCK, SENT_TO_ALL)
    device = cuda_device(ray.get_gpu_ids(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    with interrupt_flag(), captured_output(order.worker.log) as log:  # rank 0 says when to end
        here = order.done_by(device=device, log=log)
        return next((each for each in perform(here, rank_tasks.following) if isinstance(each, Failure)), None)


@contextmanager
def _reporting() -> Iterator[Report]:
    """Yield a function that puts a stage's last point into Ray's key-value store; remove all points at the end."""
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put

    reported, last = set[str](), time.monotonic()

    def report(key: str, point: CurvePoint, metric: Metric) -> None:
        nonlocal last
        if time.monotonic() - last >= POINTS_EVERY:
            reported.add(key)
            with suppress(Exception):  # a problem of the display must not fail the stage
                _internal_kv_put(key, json.dumps([asdict(point), asdict(metric)]).encode(), namespace=POINTS)
            last = time.monotonic()

    try:
        yield report
    finally:
        for key in reported:
            with suppress(Exception):
                _internal_kv_del(key, namespace=POINTS)


def _point_from(content: bytes) -> tuple[CurvePoint, Metric]:
    point, metric = parse_json(content)
    return read_as(CurvePoint, point), read_as(Metric, metric)


def _next(generator: ObjectRefGenerator) -> Any:
    """Return the next item of a task, a Failure for an error of Ray itself, or None at the end."""
    import ray
    from ray import exceptions

    try:
        return ray.get(next(generator))
    except StopIteration:
        return None
    except exceptions.TaskCancelledError:
        return Failure("the task was cancelled from outside the sweep", transient=True)
    except exceptions.RayTaskError as error:  # raised before the work began, for example by an import
        text = str(error).strip()
        return Failure(f"the worker could not start the work: {text.splitlines()[-1]}", traceback=text)
    except (exceptions.RuntimeEnvSetupError, exceptions.TaskUnschedulableError) as error:
        return Failure(f"no worker could be started: {error}")
    except exceptions.WorkerCrashedError:
        return Failure("the worker process died: killed, out of memory, or a crash in native code", transient=True)
    except exceptions.RayError as error:  # NodeDiedError, OutOfMemoryError, a lost record
        return Failure(f"the worker was lost: {str(error).strip().splitlines()[0].partition('. ')[0]}", transient=True)
