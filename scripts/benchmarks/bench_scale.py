#!/usr/bin/env python3
"""Measure what a sweep of 100,000 trials on 1,000 nodes costs its driver, in simulated time.

    python scripts/benchmarks/bench_scale.py                        # 1,000, 10,000 and 100,000 trials
    python scripts/benchmarks/bench_scale.py --trials 10000 --seeds 10000       # a dense training for each trial
    python scripts/benchmarks/bench_scale.py --trials 1000 --tracking mlflow    # with MLflow on SQLite

Trials of --seeds seeds, ten sparsities and as many learning rates as it takes are planned, handed out, shown, tracked
and compared by the code of a real sweep; nodes and tasks are simulated, see `simulated.py`. driver: CPU time of this
process between the start of the tracker and the last event, without the simulation. saved: the sweep is saved to a
store and read back. Each number of trials runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import pickle
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from io import StringIO
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.events import SweepInfo, Tracker
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.store.saved_sweep import manifest, plan_of
from orchestrator.store.store import Store
from orchestrator.sweep.first_checks import environment
from orchestrator.sweep.outcome import Outcome
from orchestrator.views.report.report_files import report
from orchestrator.views.terminal.progress import Progress
from orchestrator.views.tracking.process import TrackerProcess
from scripts.benchmarks.simulated import SimulatedExecutor, SimulatedTasks, StateWriter, ViewCost
from scripts.benchmarks.sleeping import MeasuredWriter, masks, plan_jobs

MOST_MS, MOST_MB = 6, 4000
SPARSITIES = [0.5, 0.6, 0.7, 0.8, 0.9, 0.92, 0.94, 0.96, 0.98, 0.99]

T = TypeVar("T")


@dataclass(frozen=True)
class Measurement:
    """Figures of a sweep, in seconds unless noted."""

    trials: int
    stages: int
    points: int
    """Operating points of the comparison."""
    planning: float
    busy: float
    """CPU time of the driver until all slots were busy."""
    driver: float
    simulated: float
    """Length of the sweep in simulated time."""
    refresh: float
    """CPU time of one refresh of all figures of the display, in the middle of the sweep."""
    view: float
    """CPU time of the tracker's process."""
    comparison: float
    report: float
    saved: float
    saved_mb: float
    peak_mb: float
    """Largest memory of the driver until the last event."""
    end_mb: float
    """Largest memory of the driver until the report was written."""
    view_mb: float
    """Largest memory of the tracker's process."""

    @property
    def driver_ms(self) -> float:
        """Milliseconds of the driver for a trial."""
        return 1000 * self.driver / self.trials


def measure(trials: int, given: argparse.Namespace) -> Measurement:
    """Run one simulated sweep in this process."""
    plan, planning = _timed(lambda: plan_jobs(_axes(trials, given.seeds)))
    info = SweepInfo("scale", plan.trials[0].config, "python scripts/benchmarks/bench_scale.py", environment())
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="scale")))
        store, note = Store(str(folder / "store")), folder / "note"
        tracker = stack.enter_context(_tracker(given.tracking, folder, note))
        tasks = SimulatedTasks(given.nodes, given.slots, given.seconds)
        records, busy, driver, refresh = _run(plan, info, store, tracker, tasks, given)
        peak = _peak_mb()
        comparison, comparing = _timed(lambda: compare_trials(plan, records, {}))
        files, reporting = _timed(lambda: report(info, plan, records, comparison, lambda *_: masks()))
        end = _peak_mb()
        (_, saving), size = (
            _timed(lambda: _save(store, info, plan)),
            (folder / "store/sweeps/scale.json").stat().st_size,
        )
        tracker.finish("finished", files)
        view = _view_cost(note)
    return Measurement(
        trials=trials,
        stages=len(plan.stages),
        points=len(comparison.operating_points),
        planning=planning,
        busy=busy,
        driver=driver,
        simulated=tasks.now - tasks.began,
        refresh=refresh,
        view=view.seconds,
        comparison=comparing,
        report=reporting,
        saved=saving,
        saved_mb=size / 1e6,
        peak_mb=peak,
        end_mb=end,
        view_mb=view.peak_mb,
    )


def _run(
    plan: Plan,
    info: SweepInfo,
    store: Store,
    tracker: Tracker,
    tasks: SimulatedTasks,
    given: argparse.Namespace,
) -> tuple[dict[str, StageRecord], float, float, float]:
    """Run a plan; return its records, CPU seconds until all slots were busy and in all, and those of a refresh."""
    console = Console(file=StringIO(), force_terminal=True, width=120, height=40, highlight=False)
    outcome, refresh, began = Outcome(plan, {}), 0.0, time.process_time()
    with store.leases() as leases, Progress(plan, {}, console=console) as progress:
        executor = SimulatedExecutor(store, tasks, given.nodes, given.slots, claims=leases, watch=progress.point)
        tracker.start(info, plan, {})
        for event in executor.run(plan):
            outcome.take(event)
            tracker.record(event)
            progress.event(event)
            if len(outcome.records) == len(plan.stages) // 2 and not refresh:
                refresh = _refresh(progress, console)
        driver = time.process_time() - began - tasks.own - refresh
    if len(outcome.records) != len(plan.stages):
        raise SystemExit(f"{len(outcome.records)} of {len(plan.stages)} stages finished: this was no sweep")
    return dict(outcome.records), (tasks.busy_at or began) - began, driver, refresh


def _refresh(progress: Progress, console: Console) -> float:
    """Return the CPU seconds of one refresh of the display with all its figures."""
    progress._pause = 0.0
    began = time.thread_time()
    console.render_lines(progress._render())
    return time.thread_time() - began


def main(arguments: list[str] | None = None) -> None:
    """Run the requested sweeps and print the figures of each."""
    given = _arguments(arguments)
    found = []
    for trials in given.trials:
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            found.append(each := pool.apply(measure, (trials, given)))
        print("\n".join(_told(each)), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(each) for each in found], indent=2))


def _told(found: Measurement) -> Iterator[str]:
    yield f"{found.trials} trials"
    for name, value in list(asdict(found).items())[1:]:
        yield f"  {value:10.4g}  {name}"
    yield f"  a trial: {found.driver_ms:.2f} ms of the driver (bar {MOST_MS})"
    yield f"  driver {found.end_mb:.0f} MB (bar {MOST_MB})"


def _axes(trials: int, seeds: int) -> Iterator[list[str]]:
    """Yield the overrides of each trial: seeds, sparsities, and learning rates until there are enough."""
    for index in range(trials):
        rest, seed = divmod(index, min(seeds, trials))
        rate, sparsity = divmod(rest, len(SPARSITIES))
        yield [f"seed={seed}", f"schedule.sparsity={SPARSITIES[sparsity]}", f"finetune.optimizer.lr={(rate + 1) / 1e4}"]


def _tracker(kind: str, folder: Path, note: Path) -> TrackerProcess:
    if kind == "state":
        return TrackerProcess(partial(StateWriter, note=note), print)
    uri = f"sqlite:///{folder / 'mlflow.db'}"
    return TrackerProcess(partial(MeasuredWriter, read=_read, note=note, uri=uri, experiment="pruning"), print)


def _read(key: str, name: str) -> bytes:
    del key, name
    return masks()


def _save(store: Store, info: SweepInfo, plan: Plan) -> None:
    store.save_sweep(info.name, manifest(info, plan))
    if plan_of(store, info.name).stages.keys() != plan.stages.keys():
        raise SystemExit("the saved sweep has other stages")


def _view_cost(note: Path) -> ViewCost:
    try:
        found = pickle.loads(note.read_bytes())
    except pickle.UnpicklingError:
        return ViewCost(float(note.read_text()), 0.0, 0)
    assert isinstance(found, ViewCost)
    return found


def _timed(act: Callable[[], T]) -> tuple[T, float]:
    began = time.perf_counter()
    found = act()
    return found, time.perf_counter() - began


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--seeds", type=int, default=100, help="number of seeds, each with a dense training")
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--slots", type=int, default=8, help="trials that run on a node at once")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="seconds of a segment on average, in simulated time"
    )
    parser.add_argument("--tracking", choices=["state", "mlflow"], default="state")
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
