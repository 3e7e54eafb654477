#!/usr/bin/env python3
"""Measure what Ray itself takes for each task of a sweep: trials that do nothing, on a Ray of their own.

    python scripts/benchmarks/bench_ray.py                               # 500, 2,000 and 8,000 waiting tasks
    python scripts/benchmarks/bench_ray.py --waiting 500 --trials 500

A sweep submits twice as many tasks as it has slots, so a cluster with 8,000 slots has 16,000 tasks at the driver. The
first lines measure tasks that wait behind one that runs: the time to hand one out, the time to look for arrived items
among all of them, and the driver's memory for each. The last line measures no-op trials that run one after another.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.config.cluster import Cluster
from orchestrator.execution.dispatch import Dispatcher
from orchestrator.execution.on_ray.ray_executor import RayExecutor
from scripts.benchmarks.sleeping import NoStore, make_sleeping_plan

SLEEP = "scripts.benchmarks.sleeping:sleep"
HELD = 600.0
"""Seconds of the stages behind which the others wait."""


def waiting(count: int) -> str:
    """Submit attempts that wait, and return the line about them."""
    plan, cluster = make_sleeping_plan(count, HELD, HELD), Cluster(num_cpus=1)
    with RayExecutor(cluster, NoStore(), work=SLEEP) as executor:
        dispatcher, tasks = Dispatcher(plan, cluster, NoStore().finished), executor._tasks()
        before, began, used = _memory_mb(), time.perf_counter(), time.process_time()
        executor._hand_out(dispatcher, tasks, count)
        submitted, used = time.perf_counter() - began, time.process_time() - used
        time.sleep(2)
        looks, memory = [], _memory_mb()
        for _ in range(5):
            began = time.perf_counter()
            list(tasks.receive(timeout=0))
            looks.append(time.perf_counter() - began)
        tasks.end(0)
    return (
        f"{count} waiting: {1000 * submitted / count:.2f} ms to hand one out ({1000 * used / count:.2f} ms of CPU), "
        f"{1000 * min(looks):.1f} ms to look at all, {1000 * (memory - before) / count:.1f} kB of the driver for each"
    )


def running(trials: int, slots: int) -> str:
    """Run trials that do nothing, and return the line about them."""
    plan, cluster = make_sleeping_plan(trials, 0.0, 0.0), Cluster(num_cpus=1, cpus_per_trial=1 / slots)
    with RayExecutor(cluster, NoStore(), work=SLEEP) as executor:
        for _ in executor.run(make_sleeping_plan(4 * slots, 0.5, 0.5)):  # starts the workers
            pass
        began, used = time.perf_counter(), time.process_time()
        finished = sum(event.record is not None for event in executor.run(plan))
        took, used = time.perf_counter() - began, time.process_time() - used
    if finished != len(plan.stages):
        raise SystemExit(f"{finished} of {len(plan.stages)} stages finished: this was no sweep")
    cost = f"{1000 * used / trials:.2f} ms of the driver each"
    return f"{trials} trials on {slots} slots: {trials / took:.0f} a second, {cost}"


def _memory_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 1e6


def main(arguments: list[str] | None = None) -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--waiting", type=int, nargs="+", default=[500, 2000, 8000], help="numbers of waiting tasks")
    parser.add_argument("--trials", type=int, default=2000, help="number of trials that run")
    parser.add_argument("--slots", type=int, nargs="+", default=[4, 16], help="numbers of trials that run at once")
    given = parser.parse_args(arguments)
    for count in given.waiting:
        print(waiting(count), flush=True)
    for slots in given.slots:
        print(running(given.trials, slots), flush=True)


if __name__ == "__main__":
    main()
