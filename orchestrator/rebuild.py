"""The commands that rebuild what people look at from the store: `orchestrator.compare` and `orchestrator.sync`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator import saved, tables
from orchestrator.audit import audit
from orchestrator.compare import compare, merge
from orchestrator.comparison import Comparison
from orchestrator.errors import OrchestratorError
from orchestrator.events import Failure, StageEvent, SweepInfo
from orchestrator.redact import redact
from orchestrator.report import report, write
from orchestrator.saved import SavedSweep
from orchestrator.saved_mlflow import load_from_mlflow, sweeps_in_mlflow
from orchestrator.store import Store
from orchestrator.tracking import MlflowTracker


def compare_command(arguments: Sequence[str] | None) -> int:
    """Print the comparison of the named sweeps, as one where there are several, and write its report if asked."""
    parser = _parser("compare", "Compare sweeps, each by itself or several as one, from what the store holds of them.")
    parser.add_argument("--mlflow", metavar="URI", help="read the sweeps from MLflow instead")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument("--output", metavar="FOLDER", help="write the report here: HTML, CSV, JSON, figures")
    options = parser.parse_args(arguments)
    try:
        if options.mlflow:
            where, read = f"MLflow at {redact(options.mlflow)}", None
            known = sweeps_in_mlflow(options.mlflow, options.experiment)
            load = partial(load_from_mlflow, uri=options.mlflow, experiment=options.experiment)
        else:
            store = _store(options)
            where, read, known, load = repr(store), store.read, store.sweeps(), partial(saved.load, store)
        if not options.sweeps:
            return _list(known, where)
        sweep = _merged([load(name) for name in _chosen(known, options.sweeps, where)])
        comparison = compare(sweep.plan, sweep.records, sweep.failures)
        _print(sweep, comparison)
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
    """Write to MLflow what it lacks of the named sweeps, or of all; 1 where that could not be done."""
    parser = _parser("sync", "Complete the MLflow view of sweeps from the store. Nothing is trained.", none="all")
    parser.add_argument("--uri", help="MLflow tracking URI (default: MLFLOW_TRACKING_URI, else mlflow.db here)")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument("--list", action="store_true", help="only list the sweeps of the store")
    options = parser.parse_args(arguments)
    try:
        store = _store(options)
        known = store.sweeps()
        if options.list or not known:
            return _list(known, repr(store))
        chosen = _chosen(known, options.sweeps, repr(store)) or known
    except OrchestratorError as error:
        print(error, file=sys.stderr)
        return 2
    return _sync_all(store, chosen, options)


def _sync_all(store: Store, names: Sequence[str], options: argparse.Namespace) -> int:
    """Complete one view after the other, as far as that goes; stop where MLflow cannot be reached at all."""
    status = 0
    for position, name in enumerate(names):
        try:
            tracker = sync(store, saved.load(store, name), options.uri, options.experiment)
        except OrchestratorError as error:  # one damaged file is no reason to leave out the rest
            print(error, file=sys.stderr)
            status = 2
            continue
        status = status or int(not tracker.complete)
        if not tracker.reached:
            if rest := names[position + 1 :]:
                print(f"Not tried either: {', '.join(rest)}", file=sys.stderr)
            break
    return status


def sync(store: Store, sweep: SavedSweep, uri: str | None = None, experiment: str | None = None) -> MlflowTracker:
    """Write to MLflow what it lacks of `sweep`; return the tracker, which knows whether it holds everything now."""
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
    return tracker


def _parser(name: str, description: str, none: str = "lists them") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m orchestrator.{name}", description=description)
    parser.add_argument("sweeps", nargs="*", metavar="SWEEP", help=f"a sweep, or how its name begins; none: {none}")
    parser.add_argument("--store", default="store", metavar="URI", help="where they ran (`store.uri`, default: store)")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="file system option")
    return parser


def _store(options: argparse.Namespace) -> Store:
    odd = [option for option in options.option if "=" not in option]
    if odd:
        raise OrchestratorError(f"`--option` (={odd[0]!r}) must be KEY=VALUE, such as endpoint_url=http://host:9000")
    return Store(options.store, options=dict(option.split("=", 1) for option in options.option))


def _list(known: Sequence[str], where: str) -> int:
    print("\n".join(known) if known else f"{where} holds no sweeps")
    return 0


def _chosen(known: Sequence[str], names: Sequence[str], where: str) -> list[str]:
    """Return the full names of the sweeps asked for, by how they begin."""
    chosen = []
    for name in names:
        matches = [name] if name in known else [other for other in known if other.startswith(name)]
        if len(matches) != 1:
            fault = f"is how several begin: {', '.join(matches)}" if matches else "is not there"
            raise OrchestratorError(f"`SWEEP` (={name!r}) {fault}; {where} holds: {', '.join(known) or 'none'}")
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


def _print(sweep: SavedSweep, comparison: Comparison) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    tables.print_comparison(comparison, console)
    tables.print_audit(audit(sweep.plan, sweep.records, comparison), console)
