"""`python -m orchestrator.export [SWEEP] --to FORMAT --output DIR`: take a trial's network away."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import nn

from orchestrator.commands.arguments import CommandParser, add_store, open_store
from orchestrator.commands.named_files import refuse_no_folder
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.deploy.formats.format import ExportError
from orchestrator.deploy.formats.format_table import FORMATS
from orchestrator.deploy.shrunk_network import shrunk
from orchestrator.export import trial_choice
from orchestrator.export.export_folder import Written, chosen_formats, leave, size, writable
from orchestrator.export.readme import readme
from orchestrator.export.stored_network import Kept, kept
from orchestrator.planning.number_formats import byte_size, scientific
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as
from orchestrator.views.terminal.standard_streams import say, show_what_can_be_shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a trial's network, shrunk and verified, as asked; return the exit status, 2 where that cannot be."""
    show_what_can_be_shown()
    options = _parser().parse_args(arguments)
    try:
        if not options.to:
            raise ExportError(f"`--to` must be given: one of {', '.join(FORMATS)}, or several.")
        refuse_no_folder("--output", Path(options.output))
        formats, folder = chosen_formats(options.to), writable(options.output)
        with given_as("--store"):
            store = open_store(options)
            sweep = saved_sweep.load(store, saved_sweep.chosen_sweep(store, options.sweep))

        @cache
        def found(stage: str) -> tuple[Kept, nn.Module]:
            choice, measured = (
                trial_choice.ending_with(stage, sweep.plan),
                any(each.changes_outputs for each in formats),
            )
            with given_as("--store"):
                network = kept(store, sweep, choice, run_own_code=options.run_own_code, measured=measured)
            return network, shrunk(network.model, network.inputs()[0])

        if options.best is None:
            choice, points = trial_choice.named(options.trial, sweep.plan, sweep.records), []
        else:
            comparison = compare_trials(sweep.plan, sweep.records, sweep.failures)
            points = trial_choice.meeting(options.best, comparison, sweep.plan, sweep.records)
        for chosen in formats:  # once the names are right, and before any network is built
            chosen.check_packages()
        if points:
            stage = trial_choice.fewest(points, lambda stage: size(found(stage)[1]), sweep.records)
            choice = trial_choice.ending_with(stage, sweep.plan)
        network, smaller = found(choice.stage)
        written = leave(network, smaller, formats, folder, readme(sweep, choice, network, smaller))
    except OrchestratorError as error:
        say(error, amiss=True)
        return 2
    except OSError as error:
        say(f"`--output` (={options.output!r}) cannot be written: {error.strerror or error}", amiss=True)
        return 2
    say(f"{choice.trial.name}: {byte_size(size(network.model))} -> {byte_size(size(smaller))}")
    for each in written:
        say(f"  {_told(each, network.record.primary)}")
    say(f"  {folder / 'README.md'} says what it is, and how to load it")
    return 0


def _told(written: Written, metric: Metric) -> str:
    """Say how large a format is, how near its outputs are, and what it achieves where these are others."""
    size, difference = byte_size(written.bytes), f"outputs within {scientific(written.difference)} of the masked"
    value = written.achieved.get(f"val/{metric.name}")
    achieved = "" if value is None else f", {metric.title} on validation {metric.said(value)}"
    return f"{written.format.name:<11} {size:>9}, {difference}{achieved}"


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m orchestrator.export",
        description="Take the network of a finished trial away: without what is empty, verified, with a README.",
    )
    parser.add_argument("sweep", nargs="?", metavar="SWEEP", help="a sweep, or how its name begins; none: the latest")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--trial", metavar="NAME", help="the trial, or how its name begins; the only one, if there is one"
    )
    which.add_argument(
        "--best",
        metavar="CONDITION",
        help="as in 'val/METRIC>=dense-0.5', means over seeds in units as they are shown: of the trials that meet it "
        "the one of the fewest bytes, then the fastest; its best-validated seed",
    )
    parser.add_argument("--to", action="append", metavar="FORMAT", help=f"{', '.join(FORMATS)}; again for several")
    parser.add_argument("--output", metavar="DIR", required=True, help="a new folder")
    parser.add_argument(
        "--run-own-code", action="store_true", help="import a `_target_` that the sweep names, to rebuild its network"
    )
    add_store(parser)
    return parser
