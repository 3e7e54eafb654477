#!/usr/bin/env python3
"""Measure what the executor costs: sweeps of trials whose work is a sleep, so that all else is overhead.

    python scripts/bench_sweep.py                      # 100 and 1,000 trials of 0.1 to 1 s on 8 declared CPUs
    python scripts/bench_sweep.py --trials 10000 --shortest 0.01 --longest 0.05 --json sweep.json

efficiency = ideal time / time, ideal = max(work / CPUs, longest chain); overhead = CPU time of this process a trial.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from orchestrator.cluster import Cluster
from orchestrator.execute import RayExecutor
from orchestrator.records import Plan, StageRecord, StageSpec, TrialSpec
from orchestrator.work import WorkOrder


@dataclass(frozen=True)
class NoStore:
    """A store that keeps nothing: what is measured is the executor."""

    def finished(self, keys: Iterable[str]) -> dict[str, StageRecord]:
        """Nothing is finished."""
        del keys
        return {}

    def read(self, key: str, name: str) -> bytes:
        """Nothing can be read."""
        raise FileNotFoundError(key, name)

    def commit(self, record: StageRecord, files: Mapping[str, bytes]) -> StageRecord:
        """Take the record as it is."""
        del files
        return record


@dataclass(frozen=True)
class Measurement:
    """One sweep, in seconds unless said otherwise."""

    trials: int
    cpus: int
    planning: float
    start: float
    first_event: float
    ideal: float
    time: float
    efficiency: float
    driver_ms_per_trial: float
    driver_peak_mb: float


def sleep(order: WorkOrder) -> Iterator[StageRecord]:
    """Sleep as long as each stage says."""
    for spec in order.specs:
        time.sleep(spec.fields["seconds"])
        yield _record(spec)


def make_plan(trials: int, shortest: float, longest: float) -> Plan:
    """One stage a trial, of a length drawn uniformly."""
    draw = random.Random(0)
    specs = [
        StageSpec("dense", {"index": index, "seconds": draw.uniform(shortest, longest)}) for index in range(trials)
    ]
    return Plan(
        {spec.key: spec for spec in specs},
        tuple(TrialSpec(f"trial {index}", (), {}, (spec.key,)) for index, spec in enumerate(specs)),
    )


def measure(trials: int, cpus: int, shortest: float, longest: float) -> Measurement:
    """Run one sweep on a Ray of its own."""
    began = time.perf_counter()
    plan = make_plan(trials, shortest, longest)
    planned = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as logs,
        RayExecutor(Cluster(num_cpus=cpus), NoStore(), work=f"{Path(__file__).stem}:sleep", logs=logs) as executor,
    ):
        started = time.perf_counter()
        _warm_up(executor, cpus)
        clock, used = time.perf_counter(), time.process_time()
        first = finished = 0.0
        for event in executor.run(plan):
            first = first or time.perf_counter()
            finished += event.kind == "finished"
        took, used = time.perf_counter() - clock, time.process_time() - used
    assert finished == trials
    seconds = [spec.fields["seconds"] for spec in plan.stages.values()]
    ideal = max(sum(seconds) / cpus, max(seconds))
    return Measurement(
        trials=trials,
        cpus=cpus,
        planning=planned - began,
        start=started - planned,
        first_event=first - clock,
        ideal=ideal,
        time=took,
        efficiency=ideal / took,
        driver_ms_per_trial=1000 * used / trials,
        driver_peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )


def main() -> None:
    """Run the sweeps asked for and print a line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--cpus", type=int, default=8, help="CPUs that the Ray of the sweep declares")
    parser.add_argument("--shortest", type=float, default=0.1, help="seconds of the shortest trial")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds of the longest trial")
    parser.add_argument("--json", type=Path, help="where to write the figures as well")
    given = parser.parse_args()
    found = [measure(trials, given.cpus, given.shortest, given.longest) for trials in given.trials]
    names = list(asdict(found[0]))
    print("  ".join(names))
    for one in found:
        print("  ".join(f"{value:>{len(name)}.4g}" for name, value in asdict(one).items()))
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=2))


def _warm_up(executor: RayExecutor, cpus: int) -> None:
    """Have every worker process started before the clock is."""
    for _ in executor.run(make_plan(2 * cpus, 0.5, 0.5)):
        pass


def _record(spec: StageSpec) -> StageRecord:
    return StageRecord(
        key=spec.key,
        kind=spec.kind,
        round=0,
        before={},
        after={"val/accuracy": 0.5},
        curve=(),
        requested_sparsity=None,
        sparsity=0.0,
        tensor_sparsity={},
        tensor_sizes={},
        parameters=0,
        macs=0,
        macs_remaining=0.0,
        weights_digest="",
        mask_digest="",
        steps=0,
        best_step=0,
        seconds=spec.fields["seconds"],
        started=0.0,
    )


if __name__ == "__main__":
    main()
