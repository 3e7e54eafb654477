"""Command `python -m orchestrator.gate BASELINE [SWEEP]`: check in CI that a sweep is as good as a baseline."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from orchestrator.commands.arguments import (
    CommandParser,
    add_sweep,
    named_sweep,
    open_store,
    read_named,
    replace_named,
    run_command,
    say_default,
)
from orchestrator.compare.baseline import Baseline, make_baseline, read_baseline, text_of
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.comparison import Comparison
from orchestrator.compare.pairing import hardware
from orchestrator.compare.verdicts import alarms, passes, verdicts
from orchestrator.core.errors import OrchestratorError
from orchestrator.planning.number_formats import counted
from orchestrator.store.backends import given_as
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.views.report.side_by_side import gate_table, junit
from orchestrator.views.terminal.standard_streams import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge a sweep against a baseline, or write one; return 0 if it passes, 1 if not, 2 for a mistake or no data."""
    return run_command(_parser(), _gate, arguments)


def _gate(options: argparse.Namespace) -> int:
    _refuse_unused(options)
    with given_as("--store"):
        _refuse_sweep_as_baseline(options, open_store(options).sweeps())
    _, sweep = named_sweep(options)
    comparison = compare_trials(sweep.plan, sweep.records, sweep.failures, search=sweep.search)
    for line in _search_note(sweep):
        say(line)
    if options.write_baseline:
        return _write(Path(options.baseline), sweep, comparison)
    if (baseline := _read(Path(options.baseline))) is None:
        raise OrchestratorError(f"`BASELINE` (={options.baseline}) does not exist; --write-baseline writes it.")
    return _judge(baseline, sweep, comparison, options)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m orchestrator.gate", description="Check whether a finished sweep is as good as a baseline."
    )
    parser.add_argument("baseline", metavar="BASELINE", help="a JSON file that --write-baseline wrote")
    add_sweep(parser)
    parser.add_argument("--junit", metavar="FILE", help="write a test case for each limit to this file, as JUnit XML")
    parser.add_argument("--allow-undecided", action="store_true", help="let limits that cannot be decided pass")
    parser.add_argument(
        "--write-baseline", action="store_true", help="write the sweep's figures to BASELINE; margins there are kept"
    )
    return parser


def _refuse_unused(options: argparse.Namespace) -> None:
    """Raise OrchestratorError for an option that --write-baseline would ignore."""
    unused = {"--junit": options.junit, "--allow-undecided": options.allow_undecided}
    for name in [name for name, given in unused.items() if given] if options.write_baseline else ():
        raise OrchestratorError(
            f"`{name}` has no effect with --write-baseline, which judges nothing; drop one of them."
        )


def _refuse_sweep_as_baseline(options: argparse.Namespace, sweeps: Collection[str]) -> None:
    """Raise OrchestratorError if BASELINE was left out, so that a sweep's name stands in its place."""
    if options.sweep is None and options.baseline in sweeps and not Path(options.baseline).exists():
        raise OrchestratorError(
            f"`BASELINE` (={options.baseline}) must be a file, and is the name of a sweep; type the file first: "
            f"gate baseline.json {options.baseline}"
        )


def _read(path: Path) -> Baseline | None:
    """Return the baseline in a file; None if there is no such file."""
    if (content := read_named("BASELINE", path)) is None:
        return None
    try:
        return read_baseline(content)
    except ValueError as error:
        raise OrchestratorError(
            f"`BASELINE` (={path}) is damaged or mistyped: {error}; correct it, or remove it and write it again with "
            "--write-baseline."
        ) from None


def _write(path: Path, sweep: SavedSweep, comparison: Comparison) -> int:
    baseline = make_baseline(sweep.info, comparison, sweep.plan, sweep.records, _read(path))
    replace_named("BASELINE", path, text_of(baseline).encode())
    for line in alarms(comparison, baseline):
        say(line)
    say(f"{path}: {len(baseline.points)} points of {sweep.info.name}")
    return 0


def _search_note(sweep: SavedSweep) -> Iterator[str]:
    """Yield a sentence that names the search of the sweep, if it has one."""
    if sweep.search is None:
        return
    group = sweep.info.config.get("search") or {}
    name = group.get("kind") or group.get("name") or group.get("_target_") or "?"
    stopped = f"{len(sweep.search.stopped)} of {counted(len(sweep.plan.trials), 'trial')}"
    state = "" if sweep.search.ended else ", and has not ended"
    yield (
        f"{sweep.info.name} was run by search={name}, which stopped {stopped}{state}; a point without all its seeds is "
        "undecided."
    )


def _judge(baseline: Baseline, sweep: SavedSweep, comparison: Comparison, options: argparse.Namespace) -> int:
    found = verdicts(baseline, comparison, sweep.plan, sweep.records)
    say_default(options, sweep)
    for line in gate_table(found):
        say(line)
    if (here := hardware(sweep.records.values())) != baseline.hardware:
        say(f"The baseline ran on {', '.join(baseline.hardware)}, {sweep.info.name} on {', '.join(here)}.")
    if options.junit:
        content = junit(found, options.allow_undecided, f"gate of {sweep.info.name} against {options.baseline}")
        replace_named("--junit", Path(options.junit), content)
    return 0 if passes(found, options.allow_undecided) else 1
