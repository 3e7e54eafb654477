#!/usr/bin/env python3
"""Measure the overhead of a sweep, and race it against peers.

    python scripts/benchmarks/bench_sweep.py            # 100 and 1,000 trials of 0.1 to 1 s on 8 declared CPUs
    python scripts/benchmarks/bench_sweep.py --trials 1000 --shortest 1
    python scripts/benchmarks/bench_sweep.py --trials 10000 --shortest 0.01 --longest 0.05 --json sweep.json
    python scripts/benchmarks/bench_sweep.py --peers    # eight trials: orchestrator, by hand, joblib, Ray Tune

Without --peers, trials sleep, so that everything else is overhead; they are planned, shown and logged to MLflow on
SQLite like real trials. efficiency = ideal time / time, with ideal = max(work / CPUs, longest trial), both counted from
the start of the workers. overhead: time until MLflow holds everything, minus the ideal time. driver and logging: CPU
time of this process and of the tracker's process, which overlap with the trials.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.config.cluster import Cluster
from orchestrator.core.events import StageEvent, SweepInfo, Tracker
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.execution.on_ray.ray_executor import RayExecutor
from orchestrator.sweep.first_checks import environment
from orchestrator.views.report.report_files import report
from orchestrator.views.terminal.progress import Progress
from orchestrator.views.tracking.process import TrackerProcess
from scripts.benchmarks.sleeping import MeasuredWriter, NoStore, make_sleeping_plan, masks

LEAST_EFFICIENCY, MOST_MS, MOST_MB = 0.9, 15, 1500


@dataclass(frozen=True)
class Measurement:
    """Figures of a sweep, in seconds unless noted."""

    trials: int
    cpus: int
    planning: float
    start: float
    first_event: float
    ideal: float
    time: float
    efficiency: float
    driver_ms_per_trial: float
    logging_ms_per_trial: float
    report: float
    """Comparison, tables and figures after the last trial."""
    view: float
    """Time after the report until MLflow holds everything."""
    overhead_ms_per_trial: float
    """Total wall time minus the ideal time."""
    driver_peak_mb: float


def measure(trials: int, given: argparse.Namespace) -> Measurement:
    """Run one sweep that starts Ray itself."""
    began = time.perf_counter()
    plan = make_sleeping_plan(trials, given.shortest, given.longest)
    planned = time.perf_counter()
    store = NoStore(b"" if given.executor_only else masks())
    info = SweepInfo("sleep", plan.trials[0].config, "python scripts/benchmarks/bench_sweep.py", environment())
    seconds = [sum(plan.stages[key].location["seconds"] for key in trial.stages) for trial in plan.trials]
    ideal = max(sum(seconds) / given.cpus, max(seconds))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sweep")))
        tracker = Tracker() if given.executor_only else stack.enter_context(_tracker(store, folder))
        terminal = Console(file=StringIO(), force_terminal=not given.executor_only, width=120, highlight=False)
        progress = Progress(plan, {}, console=terminal)
        cluster, logs = Cluster(num_cpus=given.cpus), folder / "logs"
        with RayExecutor(cluster, NoStore(), work="scripts.benchmarks.sleeping:sleep", logs=logs) as executor, progress:
            started = time.perf_counter()
            _warm_up(executor, given.cpus)
            clock, used = time.perf_counter(), time.process_time()
            tracker.start(info, plan, {})
            first, records = _follow(executor.run(plan), tracker, None if given.executor_only else progress)
            took, used = time.perf_counter() - clock, time.process_time() - used
        if len(records) != len(plan.stages):
            raise SystemExit(f"{len(records)} of {len(plan.stages)} stages finished: what was measured is no sweep")
        reporting, viewing = _conclude(tracker, store, info, plan, records)
        note = folder / "logging"
        return Measurement(
            trials=trials,
            cpus=given.cpus,
            planning=planned - began,
            start=started - planned,
            first_event=first - clock,
            ideal=ideal,
            time=took,
            efficiency=ideal / took,
            driver_ms_per_trial=1000 * used / trials,
            logging_ms_per_trial=1000 * float(note.read_text()) / trials if note.exists() else 0.0,
            report=reporting,
            view=viewing,
            overhead_ms_per_trial=1000 * (took + reporting + viewing - ideal) / trials,
            driver_peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        )


def main() -> None:
    """Run the requested sweeps and print a line for each."""
    given = _arguments()
    if given.peers:
        from scripts.peers.race import race

        found = race(given.seconds, given.repeats)
    else:
        found = [asdict(each) for each in _measured(given)]
    if given.json is not None:
        given.json.write_text(json.dumps(found, indent=2))


def _measured(given: argparse.Namespace) -> Iterable[Measurement]:
    for trials in given.trials:
        found = measure(trials, given)
        print(f"{found.trials} trials")
        for name, value in islice(asdict(found).items(), 1, None):
            print(f"  {value:10.4g}  {name}")
        cost = found.driver_ms_per_trial + found.logging_ms_per_trial
        print(f"  efficiency {found.efficiency:.3f} (bar {LEAST_EFFICIENCY}, for trials of a second)")
        print(f"  a trial: {found.overhead_ms_per_trial:.1f} ms on the clock, {cost:.1f} ms of CPU (bar {MOST_MS})")
        print(f"  driver {found.driver_peak_mb:.0f} MB (bar {MOST_MB})", flush=True)
        yield found


def _follow(
    events: Iterable[StageEvent], tracker: Tracker, progress: Progress | None
) -> tuple[float, dict[str, StageRecord]]:
    """Pass events to the views; return the time of the first event, and the records."""
    first, records = 0.0, {}
    for event in events:
        first = first or time.perf_counter()
        tracker.record(event)
        if progress is not None:
            progress.event(event)
        if event.record is not None:
            records[event.key] = event.record
    return first, records


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--cpus", type=int, default=8, help="number of CPUs that Ray declares")
    parser.add_argument("--shortest", type=float, default=0.1, help="seconds of the shortest trial")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds of the longest trial")
    parser.add_argument("--executor-only", action="store_true", help="without MLflow and display")
    parser.add_argument("--peers", action="store_true", help="race eight real trials against peers instead")
    parser.add_argument("--seconds", type=float, nargs="+", default=[10, 0.5], help="with --peers: length of a trial")
    parser.add_argument("--repeats", type=int, default=1, help="with --peers: repeats; medians are shown")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args()


def _tracker(store: NoStore, folder: Path) -> TrackerProcess:
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    make = partial(MeasuredWriter, read=store.read, note=folder / "logging", uri=uri, experiment="pruning")
    return TrackerProcess(make, print)


def _conclude(
    tracker: Tracker, store: NoStore, info: SweepInfo, plan: Plan, records: dict[str, StageRecord]
) -> tuple[float, float]:
    """Do the work of a sweep after its last trial; return the seconds of the report and of the view."""
    if not isinstance(tracker, TrackerProcess):
        return 0.0, 0.0
    clock = time.perf_counter()
    files = report(info, plan, records, compare_trials(plan, records, {}), store.read)
    reported = time.perf_counter()
    tracker.finish("finished", files)
    if not tracker.complete:
        raise SystemExit("MLflow does not hold the sweep: what was measured is no logging")
    return reported - clock, time.perf_counter() - reported


def _warm_up(executor: RayExecutor, cpus: int) -> None:
    """Start every worker process before timing."""
    for _ in executor.run(make_sleeping_plan(2 * cpus, 0.5, 0.5)):
        pass


if __name__ == "__main__":
    main()
