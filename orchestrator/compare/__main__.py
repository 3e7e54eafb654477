"""`python -m orchestrator.compare SWEEP [SWEEP ...]`: rebuild or merge comparisons from the store, or from MLflow."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from orchestrator.compare.audit import audit
from orchestrator.compare.compare_trials import compare_trials, merge_plans
from orchestrator.compare.comparison import Comparison
from orchestrator.config.parts.results import MARGIN
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.metrics import margin_fault
from orchestrator.store import saved_sweep
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.sweep.saved_sweeps import chosen_sweeps, list_store, list_sweeps, open_store, sweeps_parser
from orchestrator.views.report import tables
from orchestrator.views.report.files import report, write
from orchestrator.views.terminal.streams import say, show_what_can_be_shown
from orchestrator.views.tracking.read_back import load_from_mlflow, sweeps_in_mlflow


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison of the named sweeps, as one where there are several, and write its report if asked."""
    show_what_can_be_shown()
    parser = sweeps_parser(
        "compare", "Compare sweeps, each by itself or several as one, from what the store holds of them."
    )
    parser.add_argument("--mlflow", metavar="URI", help="read the sweeps from MLflow instead")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument(
        "--margin",
        metavar="LOSS",
        help="that a match may hide, in the metric's own scale (default: compare.margin of the sweeps)",
    )
    parser.add_argument("--output", metavar="FOLDER", help="write the report here: HTML, CSV, JSON, figures")
    options = parser.parse_args(arguments)
    gc.disable()  # all that is made is needed to the end: a third of the time of ten thousand trials
    try:
        margin = _margin(options.margin)
        if options.mlflow:
            where, read = f"MLflow at {options.mlflow}", None
            known = sweeps_in_mlflow(options.mlflow, options.experiment)
            load = partial(load_from_mlflow, uri=options.mlflow, experiment=options.experiment)
        else:
            store = open_store(options)
            if not options.sweeps:
                return list_store(store)
            where, read, known, load = str(store), store.read, store.sweeps(), partial(saved_sweep.load, store)
        if not options.sweeps:
            return list_sweeps(known, where)
        sweep = _merged([load(name) for name in chosen_sweeps(known, options.sweeps, where)])
        for metric in {record.primary for record in sweep.records.values()} if margin is not None else ():
            if fault := margin_fault(metric, margin or 0.0):
                raise OrchestratorError(f"`--margin` (={margin}) {fault}")
        comparison = compare_trials(sweep.plan, sweep.records, sweep.failures, margin)
        _print(sweep, comparison)
        if options.output:
            files = report(sweep.info, sweep.plan, sweep.records, comparison, read)
            write(Path(options.output), files)
            say(f"report: {Path(options.output, 'comparison', 'report.html').absolute()}")
    except OrchestratorError as error:
        say(error, amiss=True)
        return 2
    except OSError as error:
        say(f"`--output` (={options.output!r}) cannot be written: {error}", amiss=True)
        return 2
    finally:
        gc.enable()
    return 0


def _margin(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        margin = float(text)
    except ValueError:
        raise OrchestratorError(f"`--margin` (={text}) must be a number; pass 0.01 for one point.") from None
    if not MARGIN.holds(margin):
        raise OrchestratorError(f"`--margin` (={margin}) must {MARGIN.text}.")
    return margin


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
        plan=merge_plans([sweep.plan for sweep in sweeps]),
        records={key: record for sweep in sweeps for key, record in sweep.records.items()},
        failures={key: reason for sweep in sweeps for key, reason in sweep.failures.items()},
    )


def _print(sweep: SavedSweep, comparison: Comparison) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    tables.print_comparison(comparison, console)
    tables.print_audit(audit(sweep.plan, sweep.records, comparison), console)
    tables.print_forecast(sweep.info, sweep.plan, sweep.records, console)


if __name__ == "__main__":
    sys.exit(main())
