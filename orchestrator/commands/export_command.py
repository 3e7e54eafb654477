"""Command `python -m orchestrator.export [SWEEP] --to FORMAT --output DIR`: export a trial's network."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import nn

from orchestrator.commands.arguments import (
    CommandParser,
    add_sweep,
    check_output_folder,
    named_sweep,
    run_command,
    say_default,
)
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.core.metrics import Metric
from orchestrator.deploy.checked_writing import CODECS, Deployed, shrunk, smaller_for
from orchestrator.deploy.formats.format import Codec, ExportError
from orchestrator.deploy.formats.huggingface_format import NAME as HUGGINGFACE
from orchestrator.export import trial_choice
from orchestrator.export.export_folder import (
    chosen_formats,
    require_builder,
    size,
    writable,
    write_folder,
)
from orchestrator.export.model_card import Card, Origin
from orchestrator.export.readme import readme
from orchestrator.export.stored_network import StoredNetwork, kept
from orchestrator.planning.number_formats import byte_size, scientific
from orchestrator.store.backends import given_as
from orchestrator.views.terminal.standard_streams import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a trial's network, shrunk and verified, in the given formats; return the exit status, 2 for an error."""
    return run_command(_parser(), _export, arguments)


def _export(options: argparse.Namespace) -> int:
    if not options.to:
        raise ExportError(f"`--to` must be given, once or several times; type one of {', '.join(CODECS)}.")
    check_output_folder("--output", Path(options.output))
    formats, folder = chosen_formats(options.to), writable(options.output)
    store, sweep = named_sweep(options)

    @cache
    def found(stage: str) -> tuple[StoredNetwork, nn.Module]:
        choice, measured = trial_choice.ending_with(stage, sweep.plan), any(f.row.changes_outputs for f in formats)
        require_builder(formats, choice.trial.config["model"])
        say(f"building the network of {choice.trial.name!r}, and removing what its masks emptied ...")
        with given_as("--store"):
            network = kept(store, sweep, choice, run_own_code=options.run_own_code, measured=measured)
        return network, _smaller(network, formats)

    if options.best is None:
        choice, points = trial_choice.trial_named(options.trial, sweep.plan, sweep.records), []
    else:
        comparison = compare_trials(sweep.plan, sweep.records, sweep.failures, search=sweep.search)
        points = trial_choice.points_meeting(options.best, comparison, sweep.plan, sweep.records)
    for chosen in formats:  # after all names were checked, and before any network is built
        chosen.check_packages()
    if points:
        stage = trial_choice.smallest_stage(points, lambda stage: size(found(stage)[1]), sweep.records)
        choice = trial_choice.ending_with(stage, sweep.plan)
    network, smaller = found(choice.stage)
    card = readme(sweep, choice, network, smaller, Origin(options.base_model, options.license))
    say(f"writing {', '.join(each.name for each in formats)}, and comparing the outputs with the masked network's ...")
    written = write_folder(network, smaller, formats, folder, card)
    if points:
        figures = trial_choice.figures_text(options.best, choice.stage, points, sweep.plan, sweep.records)
        say(f"--best {options.best!r}: {figures}")
    say_default(options, sweep)
    say(f"{choice.trial.name}: {byte_size(size(network.model))} -> {byte_size(size(smaller))}")
    _say_written(written, folder, network, card)
    return 0


def _say_written(written: Sequence[Deployed], folder: Path, network: StoredNetwork, card: Card) -> None:
    """Print a line for each format, and what the README lacks before a network is published."""
    for each in written:
        say(f"  {_format_line(each, network.record.primary)}")
    say(f"  {folder / 'README.md'} describes the network and how to load it")
    if any(each.format.name == HUGGINGFACE for each in written):
        for lacking in card.origin.lacks():
            say(f"  before you publish it: the README {lacking}")


def _smaller(network: StoredNetwork, formats: Sequence[Codec]) -> nn.Module:
    """Return the shrunk network; without a trace, which takes minutes for a large network, if no format needs one."""
    only = formats[0] if len(formats) == 1 else None
    example = network.inputs[0]
    return smaller_for(only, network.model, example, lambda: shrunk(network.model, example))


def _format_line(written: Deployed, metric: Metric) -> str:
    """Return a line with a format's size, the difference of its outputs, and its metric if the outputs change."""
    size, difference = byte_size(written.bytes), f"outputs within {scientific(written.difference)} of the masked"
    value = written.achieved.get(f"val/{metric.name}")
    achieved = "" if value is None else f", {metric.title} on validation {metric.said(value)}"
    return f"{written.format.name:<11} {size:>9}, {difference}{achieved}"


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m orchestrator.export",
        description="Export the network of a finished trial: shrunk, verified, with a README.",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--trial", metavar="NAME", help="name of the trial, or its beginning (default: the only trial)")
    which.add_argument(
        "--best",
        metavar="CONDITION",
        help="such as 'val/METRIC>=dense-0.005', on means over seeds in the metric's own scale, as in margins: 0.005 "
        "of an accuracy is half a point; exports the trial with the fewest bytes that meets it, then the fastest, and "
        "of its seeds the best-validated one",
    )
    parser.add_argument(
        "--to", action="append", metavar="FORMAT", help=f"{', '.join(CODECS)}; repeat the option for several formats"
    )
    parser.add_argument("--output", metavar="DIR", required=True, help="a new or empty folder")
    parser.add_argument(
        "--base-model",
        metavar="NAME",
        default="",
        help="name on the hub of what was pruned, for the README",
    )
    parser.add_argument("--license", metavar="NAME", default="", help="its license, such as apache-2.0, for the README")
    parser.add_argument("--run-own-code", action="store_true", help="import and run a `_target_` that the sweep names")
    add_sweep(parser)
    return parser
