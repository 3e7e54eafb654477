"""Command `python -m orchestrator.sync [SWEEP ...]`: complete the MLflow view of sweeps from the store."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial

from orchestrator.commands.arguments import file_system, list_store, open_store, run_command, sweeps_parser
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.config.results import ADDRESS
from orchestrator.config.tracking_uri import resolve_experiment, resolve_uri
from orchestrator.core.errors import CannotKeep, OrchestratorError
from orchestrator.core.events import Failure, StageEvent
from orchestrator.execution import interrupts
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.sweep.outcome import EXIT_BEHIND, behind
from orchestrator.views.report.report_files import report
from orchestrator.views.terminal.standard_streams import say
from orchestrator.views.tracking.view_writer import Requests, ViewWriter

PROGRESS_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the missing runs of the named sweeps, or of all, to MLflow; return 3 if MLflow could not be completed."""
    interrupts.leave_when_interrupted()
    parser = sweeps_parser("sync", "Complete the MLflow view of sweeps from the store. Nothing is trained.", none="all")
    parser.add_argument("--uri", help="MLflow tracking URI (default: MLFLOW_TRACKING_URI, else mlflow.db here)")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument("--list", action="store_true", help="only list the sweeps in the store")
    return run_command(parser, _run, arguments)


def _run(options: argparse.Namespace) -> int:
    if options.uri is not None and not ADDRESS.holds(options.uri):
        raise OrchestratorError(f"`--uri` (={options.uri}) must {ADDRESS.text}.")
    with given_as("--store"):
        store = open_store(options)
        known = store.sweeps()
    if options.list or not known:
        return list_store(store)
    return _sync_all(store, saved_sweep.chosen_sweeps(known, options.sweeps, str(store)) or known, options)


def _sync_all(store: Store, names: Sequence[str], options: argparse.Namespace) -> int:
    """Complete one view after another; stop at the first that MLflow cannot take. Return the exit status."""
    status, left = 0, list[str]()
    for position, name in enumerate(names):
        try:
            with given_as("--store"):
                sweep = saved_sweep.load(store, name)
            sync(store, sweep, options.uri, options.experiment)
        except CannotKeep as error:
            say(error, amiss=True)
            left += names[position:]
            break
        except OrchestratorError as error:  # a damaged sweep must not stop the others
            say(error, amiss=True)
            status = 2
    if left:
        where = {"uri": options.store, "options": file_system(options.option, "--option")}
        say(behind(left, where, uri=options.uri, experiment=options.experiment), amiss=True)
    return status or (EXIT_BEHIND if left else 0)


def sync(store: Store, sweep: SavedSweep, uri: str | None = None, experiment: str | None = None) -> None:
    """Write the missing runs and artifacts of `sweep` to MLflow.

    Raises:
        CannotKeep: MLflow cannot be used, refuses a request, or was unreachable for too long
    """
    shown, total = time.monotonic(), len(sweep.plan.trials) + 2

    def wrote(left: int) -> None:
        nonlocal shown
        if time.monotonic() > shown + PROGRESS_SECONDS:
            shown = time.monotonic()
            say(f"{sweep.info.name}: {total - left} of {total} runs")

    missing = [key for key in sweep.plan.stages if key not in sweep.records]
    comparison = compare_trials(sweep.plan, sweep.records, sweep.failures, search=sweep.search)
    files = report(sweep.info, sweep.plan, sweep.records, comparison, store.read)
    requests = Requests()
    requests.put(("start", sweep.info, sweep.plan, sweep.records))
    for key in sweep.failures.keys() & missing:
        requests.put(("record", StageEvent("failed", key, time.time(), failure=Failure(sweep.failures[key]))))
    if sweep.search is not None:
        requests.put(("decided", sweep.search))
        missing = [key for key in sweep.search.run if key in missing] if sweep.search.ended else missing
    requests.put(("finish", "finished" if not missing else "failed" if sweep.failures else "killed", files))
    uri, experiment = resolve_uri(uri), resolve_experiment(experiment)
    warn = partial(say, amiss=True)
    write = partial(ViewWriter, read=store.read, leases=store.leases, uri=uri, experiment=experiment)
    write(requests, warn, wrote).write()
    say(f"{sweep.info.name}: {len(sweep.plan.trials)} trials are in MLflow at {uri}")
