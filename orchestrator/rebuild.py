"""The commands that rebuild what people look at from the store: `orchestrator.compare` and `orchestrator.sync`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator import saved, tables
from orchestrator.compare import compare, merge
from orchestrator.comparison import Comparison
from orchestrator.records import Failure, OrchestratorError, StageEvent, SweepInfo
from orchestrator.redact import redact
from orchestrator.report import report, write
from orchestrator.saved import SavedSweep
from orchestrator.saved_mlflow import load_from_mlflow
from orchestrator.store import Store
from orchestrator.tracking import MlflowTracker


def compare_command(arguments: Sequence[str] | None) -> int:
    """Print the comparison of the named sweeps, as one where there are several, and write its report if asked."""
    parser = _parser("compare", "Compare sweeps, each by itself or several as one, from what the store holds of them.")
    parser.add_argument("--mlflow", metavar="URI", help="read the sweeps, by their full names, from MLflow instead")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument("--output", metavar="FOLDER", help="write the report here: HTML, CSV, JSON, figures")
    options = parser.parse_args(arguments)
    try:
        if options.mlflow:
            sweeps = [load_from_mlflow(name, options.mlflow, options.experiment) for name in options.sweeps]
            read = None
        else:
            store = _store(options)
            sweeps = [saved.load(store, name) for name in _chosen(store, options.sweeps)]
            read = store.read
        if not sweeps:
            return 0
        sweep = _merged(sweeps)
        comparison = compare(sweep.plan, sweep.records, sweep.failures)
        _print(comparison)
        if options.output:
            files = report(sweep.info, sweep.plan, sweep.records, comparison, read)
            write(Path(options.output), files)
            print(f"report: {Path(options.output, 'comparison', 'report.html').absolute()}")
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"`--output` (={options.output!r}) cannot be written: {error}", file=sys.stderr)
        return 2
    return 0


def sync_command(arguments: Sequence[str] | None) -> int:
    """Write to MLflow what it lacks of the named sweeps; 1 where that could not be done."""
    parser = _parser("sync", "Complete the MLflow view of sweeps from the store. Nothing is trained.")
    parser.add_argument("--uri", help="MLflow tracking URI (default: MLFLOW_TRACKING_URI, else mlflow.db here)")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    options = parser.parse_args(arguments)
    try:
        store = _store(options)
        complete = [
            sync(store, saved.load(store, name), options.uri, options.experiment)
            for name in _chosen(store, options.sweeps)
        ]
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return 2
    return 0 if all(complete) else 1


def sync(store: Store, sweep: SavedSweep, uri: str | None = None, experiment: str | None = None) -> bool:
    """Write to MLflow what it lacks of `sweep`; return whether it holds everything now."""
    tracker = MlflowTracker(store.read, uri=uri, experiment=experiment, warn=lambda text: print(text, file=sys.stderr))
    tracker.start(sweep.info, sweep.plan, sweep.records)
    missing = [key for key in sweep.plan.stages if key not in sweep.records]
    for key in missing:
        if key in sweep.failures:
            tracker.record(StageEvent("failed", key, time.time(), failure=Failure(sweep.failures[key])))
    comparison = compare(sweep.plan, sweep.records, sweep.failures)
    files = report(sweep.info, sweep.plan, sweep.records, comparison, store.read)
    tracker.finish("finished" if not missing else "failed" if sweep.failures else "killed", files)
    if tracker.complete:
        print(f"{sweep.info.name}: {len(sweep.plan.trials)} trials are in MLflow at {redact(tracker.uri)}")
    return tracker.complete


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m orchestrator.{name}", description=description)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help="a sweep, or how its name begins; none lists them")
    parser.add_argument("--store", default="store", metavar="URI", help="where they ran (`store.uri`, default: store)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="file system option")
    return parser


def _store(options: argparse.Namespace) -> Store:
    odd = [option for option in options.option if "=" not in option]
    if odd:
        raise OrchestratorError(f"`--option` (={odd[0]!r}) must be KEY=VALUE, such as endpoint_url=http://host:9000")
    return Store(options.store, options=dict(option.split("=", 1) for option in options.option))


def _chosen(store: Store, names: Sequence[str]) -> list[str]:
    """Return the full names of sweeps; where none is asked for, list them."""
    known = store.sweeps()
    if not names:
        print("\n".join(known) if known else f"{store!r} holds no sweeps")
    chosen = []
    for name in names:
        matches = [name] if name in known else [other for other in known if other.startswith(name)]
        if len(matches) != 1:
            fault = f"is how several begin: {', '.join(matches)}" if matches else "is not in the store"
            raise OrchestratorError(f"`SWEEP` (={name!r}) {fault}; {store!r} holds: {', '.join(known) or 'none'}")
        chosen += matches
    return chosen


def _merged(sweeps: Sequence[SavedSweep]) -> SavedSweep:
    first = sweeps[0]
    if len(sweeps) == 1:
        return first
    return SavedSweep(
        info=SweepInfo(
            name=" + ".join(sweep.info.name for sweep in sweeps),
            config={sweep.info.name: dict(sweep.info.config) for sweep in sweeps},
            command="\n".join(sweep.info.command for sweep in sweeps),
            environment=first.info.environment,
        ),
        plan=merge([sweep.plan for sweep in sweeps]),
        records={key: record for sweep in sweeps for key, record in sweep.records.items()},
        failures={key: reason for sweep in sweeps for key, reason in sweep.failures.items()},
    )


def _print(comparison: Comparison) -> None:
    from rich.console import Console

    tables.print_comparison(comparison, Console(highlight=False))
