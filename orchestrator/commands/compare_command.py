"""Command `python -m orchestrator.compare SWEEP [SWEEP]`: compare the trials of a sweep, or two sweeps."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from orchestrator.commands.arguments import (
    add_option,
    check_output_folder,
    file_system,
    list_store,
    list_sweeps,
    open_store,
    run_command,
    sweeps_parser,
)
from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.compare_trials import compare_trials, merge_plans
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.pairing import Side
from orchestrator.compare.two_sweeps import TwoSweeps, compare_two
from orchestrator.config.results import MARGIN
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Decision, SweepInfo
from orchestrator.core.metrics import margin_fault
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Store
from orchestrator.sweep.beside_grid import beside_grid
from orchestrator.views.report import side_by_side, tables
from orchestrator.views.report.answers import answer_lines
from orchestrator.views.report.figures.layer_data import ReadFile
from orchestrator.views.report.report_files import report, write
from orchestrator.views.terminal.standard_streams import say
from orchestrator.views.tracking.read_back import load_from_mlflow, sweeps_in_mlflow
from pruning.measure.garbage_collection import collector_paused


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison of one sweep, of several merged sweeps, or of two side by side; write the report if asked.

    Returns:
        the exit status: 2 for a mistake, or if no trial has finished
    """
    return run_command(_parser(), _compare, arguments)


def _compare(options: argparse.Namespace) -> int:
    if options.output is not None:
        check_output_folder("--output", Path(options.output))
    with collector_paused(), given_as("--store"):  # nothing becomes garbage before the end
        return _run(options, _margin(options.margin))


def _parser() -> argparse.ArgumentParser:
    parser = sweeps_parser(
        "compare", "Compare the trials of a sweep, or two sweeps side by side, from the records in the store."
    )
    parser.add_argument("--merge", action="store_true", help="compare the trials of several sweeps as one sweep")
    parser.add_argument("--other-store", metavar="URI", help="store of the second of two sweeps, if it is another")
    add_option(parser, "--other-option", "option of the other store's file system")
    parser.add_argument("--mlflow", metavar="URI", help="read the sweeps from MLflow and not from the store")
    parser.add_argument("--experiment", help="MLflow experiment (default: MLFLOW_EXPERIMENT_NAME, else pruning)")
    parser.add_argument(
        "--margin",
        metavar="LOSS",
        help="largest loss that counts as a match, in the metric's own scale (default: compare.margin of the sweeps)",
    )
    parser.add_argument(
        "--output", metavar="FOLDER", help="write the report here: HTML, CSV, JSON, figures; for two sweeps a CSV"
    )
    return parser


def _run(options: argparse.Namespace, margin: float | None) -> int:
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
    two = _asks_for_two(options)
    names = saved_sweep.chosen_sweeps(
        known, options.sweeps[:1] if two and options.other_store else options.sweeps, where
    )
    sweeps = [load(name) for name in names]
    if two and options.other_store:
        sweeps.append(_from_other_store(options))
    shown = sweeps if two else [_merged(sweeps)]
    sides = [Side(sweep, _compared(sweep, margin)) for sweep in shown]
    if two:
        _side_by_side(compare_two(*sides), options.output)
        _beside_grid(sweeps, margin)
        return 0
    _alone(sides[0], read, options.output)
    _beside_grid(sweeps, margin)
    return 0 if sides[0].comparison.points else 2


def _asks_for_two(options: argparse.Namespace) -> bool:
    """Return whether two sweeps are compared side by side; raise OrchestratorError if the options are ambiguous."""
    count = len(options.sweeps)
    if options.other_store and (count != 2 or options.merge):
        raise OrchestratorError(
            f"`--other-store` (={options.other_store}) is the store of the second of two sweeps; name two sweeps, "
            "without --merge."
        )
    if count > 2 and not options.merge:
        raise OrchestratorError(
            f"`SWEEP` names {count} sweeps, and at most two can be compared side by side; pass --merge to compare the "
            "trials of all of them as one sweep."
        )
    return count == 2 and not options.merge


def _from_other_store(options: argparse.Namespace) -> SavedSweep:
    given = file_system(options.other_option, "--other-option")
    with given_as("--other-store"):
        store = Store(options.other_store, options=given).opened(exists=True)
        (name,) = saved_sweep.chosen_sweeps(store.sweeps(), options.sweeps[1:], str(store))
        sweep = saved_sweep.load(store, name)
    return replace(sweep, info=replace(sweep.info, name=f"{name} of {store}"))  # both may have the same name


def _compared(sweep: SavedSweep, margin: float | None) -> Comparison:
    for metric in {record.primary for record in sweep.records.values()} if margin is not None else ():
        if fault := margin_fault(metric, margin or 0.0):
            raise OrchestratorError(f"`--margin` (={margin}) {fault}")
    return compare_trials(sweep.plan, sweep.records, sweep.failures, margin, sweep.search)


def _side_by_side(found: TwoSweeps, output: str | None) -> None:
    for line in side_by_side.two_sweeps_text(found):
        say(line)
    if output:
        write(Path(output), {side_by_side.FILE: side_by_side.two_sweeps_csv(found)})
        say(f"differences: {Path(output, side_by_side.FILE).absolute()}")


def _alone(side: Side, read: ReadFile | None, output: str | None) -> None:
    sweep, comparison = side.sweep, side.comparison
    _print(sweep, comparison)
    if output:
        write(Path(output), report(sweep.info, sweep.plan, sweep.records, comparison, read))
        say(f"report: {Path(output, 'comparison', 'report.html').absolute()}")


def _beside_grid(sweeps: Sequence[SavedSweep], margin: float | None) -> None:
    """Set the answer of a search beside that of its whole grid: the same sweep, or another one with its networks."""
    for sweep in sweeps:
        networks = {trial.stages[-1] for trial in sweep.plan.trials}
        grids = [other for other in sweeps if other.search is None and networks <= other.plan.stages.keys()]
        for grid in [sweep] if networks <= sweep.records.keys() | sweep.failures.keys() else grids[:1]:
            records = {**sweep.records, **grid.records}
            failed = (sweep.failures.keys() | grid.failures.keys()) - records.keys()
            for line in beside_grid(sweep, records, failed, margin):
                say(line)


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
        search=_merged_searches([sweep.search for sweep in sweeps if sweep.search is not None]),
    )


def _merged_searches(searches: Sequence[Decision]) -> Decision | None:
    """Return the looks, the answers and the stopped trials of several searches; None if there is none."""
    if not searches:
        return None
    return Decision(
        looks=tuple(look for search in searches for look in search.looks),
        stopped={name: reason for search in searches for name, reason in search.stopped.items()},
        answers=tuple(dict.fromkeys(answer for search in searches for answer in search.answers)),
        networks=tuple(dict.fromkeys(key for search in searches for key in search.networks)),
        ended=all(search.ended for search in searches),
    )


def _print(sweep: SavedSweep, comparison: Comparison) -> None:
    from orchestrator.views.terminal.standard_streams import Console

    console = Console(highlight=False)
    tables.print_comparison(comparison, console)
    tables.print_audit(audit(sweep.plan, sweep.records, comparison), console)
    tables.print_forecast(sweep.info, sweep.plan, sweep.records, console)
    for line in answer_lines(comparison):
        tables.print_line(console, line)
