"""Complete the MLflow view of sweeps from the store."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Failure, StageEvent
from orchestrator.store import saved_sweep
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.sweep.saved_sweeps import chosen_sweeps, list_store, open_store, sweeps_parser
from orchestrator.views.report.files import report
from orchestrator.views.terminal.streams import say
from orchestrator.views.tracking.tracker import MlflowTracker


def sync_command(arguments: Sequence[str] | None) -> int:
    """Write to MLflow what it lacks of the named sweeps, or of all; 1 where that could not be done."""
    parser = sweeps_parser("sync", "Complete the MLflow view of sweeps from the store. Nothing is trained.", none="all")
    parser.add_argument("--uri", help="MLflow tracking URI (default: MLFLOW_TRACKING_URI, else mlflow.db here)")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument("--list", action="store_true", help="only list the sweeps of the store")
    options = parser.parse_args(arguments)
    try:
        store = open_store(options)
        known = store.sweeps()
        if options.list or not known:
            return list_store(store)
        chosen = chosen_sweeps(known, options.sweeps, str(store)) or known
    except OrchestratorError as error:
        say(error, amiss=True)
        return 2
    return _sync_all(store, chosen, options)


def _sync_all(store: Store, names: Sequence[str], options: argparse.Namespace) -> int:
    """Complete one view after the other, as far as that goes; stop where MLflow cannot be reached at all."""
    status = 0
    for position, name in enumerate(names):
        try:
            tracker = sync(store, saved_sweep.load(store, name), options.uri, options.experiment)
        except OrchestratorError as error:  # one damaged file is no reason to leave out the rest
            say(error, amiss=True)
            status = 2
            continue
        status = status or int(not tracker.complete)
        if not tracker.reached:
            if rest := names[position + 1 :]:
                say(f"Not tried either: {', '.join(rest)}", amiss=True)
            break
    return status


def sync(store: Store, sweep: SavedSweep, uri: str | None = None, experiment: str | None = None) -> MlflowTracker:
    """Write to MLflow what it lacks of `sweep`; return the tracker, which knows whether it holds everything now."""
    tracker = MlflowTracker(store.read, uri=uri, experiment=experiment, warn=partial(say, amiss=True))
    tracker.start(sweep.info, sweep.plan, sweep.records)
    missing = [key for key in sweep.plan.stages if key not in sweep.records]
    for key in missing:
        if key in sweep.failures:
            tracker.record(StageEvent("failed", key, time.time(), failure=Failure(sweep.failures[key])))
    comparison = compare_trials(sweep.plan, sweep.records, sweep.failures)
    files = report(sweep.info, sweep.plan, sweep.records, comparison, store.read)
    tracker.finish("finished" if not missing else "failed" if sweep.failures else "killed", files)
    if tracker.complete:
        say(f"{sweep.info.name}: {len(sweep.plan.trials)} trials are in MLflow at {tracker.uri}")
    return tracker
