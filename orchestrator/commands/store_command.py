"""Command `python -m orchestrator.store COMMAND`: inspect and clean a store. No code that a store names is run."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import get_args

from orchestrator.commands.arguments import (
    CommandParser,
    add_option,
    add_store,
    file_system,
    list_store,
    open_store,
    run_command,
)
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import byte_size, counted, first_few
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as, named_as
from orchestrator.store.retention import UNFINISHED, Pruned, prune, sizes, verify
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Keep, Store
from orchestrator.views.terminal.stage_lines import checkpointed
from orchestrator.views.terminal.standard_streams import say


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit status: 2 for a mistake, 1 if the store is damaged."""
    return run_command(_parser(), _run, arguments)


def _run(options: argparse.Namespace) -> int:
    with given_as("--store"):
        store = open_store(options, keep=getattr(options, "keep", "needed"))
        if "sweep" in options:
            (options.sweep,) = saved_sweep.chosen_sweeps(store.sweeps(), [options.sweep], str(store))
        status: int = options.run(store, options)
    return status


def _list(store: Store, _: argparse.Namespace) -> int:
    return list_store(store)


def _show(store: Store, options: argparse.Namespace) -> int:
    sweep = saved_sweep.load(store, options.sweep)
    plan, records, held = sweep.plan, sweep.records, _held(store, sweep.plan.belonging)
    finished = [keys for keys in plan.work if all(key in records for key in keys)]
    alone = plan.stages.keys() & saved_sweep.only_of(store, options.sweep)
    say(options.sweep)
    say(f"  command  {sweep.info.command}")
    say(f"  trials   {len(finished)} of {len(plan.trials)} finished")
    say(f"  stages   {len(records)} of {len(plan.stages)} finished, {len(alone)} in no other sweep")
    weights = sum(info.bytes for record in records.values() for name, info in record.files.items() if name == WEIGHTS)
    states = sum(size for path, size in held.items() if path.startswith("checkpoints/"))
    of_it = f"{byte_size(weights)} of it weights" + (f", {byte_size(states)} checkpoints" if states else "")
    say(f"  size     {byte_size(sum(held.values()))}, {of_it}")
    if records:
        begun = min(record.started for record in records.values())
        ended = max(record.started + record.seconds for record in records.values())
        say(f"  trained  {_time(begun)} to {_time(ended)} on {', '.join(sorted({r.host for r in records.values()}))}")
    say("  with     " + ", ".join(f"{name} {version}" for name, version in sweep.info.environment.items()))
    for reason, names in _missing(store, sweep).items():
        say(f"  missing  {first_few(names)}: {reason}")
    return 0


def _missing(store: Store, sweep: SavedSweep) -> dict[str, list[str]]:
    """Return reason -> names of the trials that have not finished for that reason."""
    plan, found = sweep.plan, dict[str, list[str]]()
    begun = {
        key: checkpointed(plan.stages[key], place, store.checkpoints.curve(key))
        for key, place in store.checkpoints.places(plan.stages.keys() - sweep.records.keys()).items()
    }
    for trial, keys in zip(plan.trials, plan.work, strict=True):
        missing = [key for key in keys if key not in sweep.records]
        if missing:
            trained = not any(KINDS[plan.stages[key].kind].trains for key in missing)
            known = [each[key] for each in (sweep.failures, begun) for key in missing if key in each]
            reason = known[0] if known else "trained, not measured" if trained else "not run"
            found.setdefault(reason, []).append(trial.name)
    return found


def _held(store: Store, keys: Collection[str]) -> dict[str, int]:
    """Return path -> bytes of all files of the stages `keys`: results, checkpoints and failures."""
    entries = ((entry.path.split("/"), entry) for entry in store.backend.entries())
    return {entry.path: entry.bytes for path, entry in entries if path[0] in saved_sweep.OF_STAGES and path[1] in keys}


def _delete(store: Store, options: argparse.Namespace) -> int:
    keys = set(saved_sweep.only_of(store, options.sweep))
    size = byte_size(sum(_held(store, keys).values()))
    say(f"{options.sweep}: the sweep, and {len(keys)} stages with {size} that no other sweep needs")
    if not options.yes and not _confirmed():
        say("nothing was deleted")
        return 0
    saved_sweep.delete(store, options.sweep)
    say("deleted")
    return 0


def _confirmed() -> bool:
    """Ask whether to delete; raise OrchestratorError if nobody answers and standard input is not a terminal."""
    with suppress(EOFError):
        answer = input("Delete them? Only training can restore them. MLflow is not changed. [y/N] ").strip().lower()
        if answer in ("y", "yes", "n", "no") or sys.stdin.isatty():
            return answer in ("y", "yes")
    raise OrchestratorError("nobody answered, so nothing was deleted; pass --yes to delete without the question")


def _copy(store: Store, options: argparse.Namespace) -> int:
    given = file_system(options.target_option, "--target-option")
    with given_as("URI"):
        target = Store(options.target, options=given).opened()
    copied = saved_sweep.copy(store, options.sweep, target)
    say(f"{options.sweep}: {copied} stages were copied to {target} and verified")
    return 0


def _report(store: Store, _: argparse.Namespace) -> int:
    for category, (files, size) in sorted(sizes(store).items(), key=lambda item: -item[1][1]):
        say(f"{category:<20}{files:>10} file{'s' if files != 1 else ' '}{byte_size(size):>12}")
    say(f"{counted(len(store.stages.known()), 'stage')}, {counted(len(store.sweeps()), 'sweep')} (`list` names them)")
    idle = prune(store, dry_run=True)
    say(f"prune would free {byte_size(idle.bytes)}: {_summary(idle)}")
    _warn(idle)
    return 0


def _prune(store: Store, options: argparse.Namespace) -> int:
    pruned = prune(store, dry_run=options.dry_run)
    say(f"{'would free' if options.dry_run else 'freed'} {byte_size(pruned.bytes)}: {_summary(pruned)}")
    for name in store.backend.names("quarantine") if options.quarantine else ():
        if not options.dry_run:
            store.backend.remove_folder(f"quarantine/{name}")
        say(f"{'would remove' if options.dry_run else 'removed'} quarantine/{name}")
    return _warn(pruned)


def _warn(pruned: Pruned) -> int:
    """Print a warning for each saved sweep that cannot be read; return the exit status."""
    for damage in pruned.damages:
        say(f"{named_as('--store', damage)}. Until then all weights stay, as this sweep might need them.", amiss=True)
    return 1 if pruned.damages else 0


def _verify(store: Store, _: argparse.Namespace) -> int:
    stages = len(store.stages.known())
    damages = verify(store)
    for damage in damages:
        say(named_as("--store", damage), amiss=True)
    say(f"{stages - len(damages)} of {stages} stages are intact")
    return 1 if damages else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m orchestrator.store", description="Inspect and clean a store.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[Store, argparse.Namespace], int], text: str, sweep: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run)
        if sweep:
            added.add_argument("sweep", metavar="SWEEP", help="name of a sweep, or its beginning")
        add_store(added)
        return added

    command("list", _list, "list the sweeps with time, status, size and command")
    command("show", _show, "show a sweep: its command, trials, size, and missing trials with reasons", sweep=True)
    deleting = command(
        "delete", _delete, "remove a sweep and the stages that no other sweep needs; MLflow is not changed", sweep=True
    )
    deleting.add_argument("--yes", action="store_true", help="delete without a question")
    copying = command("copy", _copy, "copy a sweep to another store, and verify every file", sweep=True)
    copying.add_argument("target", metavar="URI", help="the other store")
    add_option(copying, "--target-option", "option of the other store's file system")
    command("report", _report, "report the files and bytes of each category")
    pruning = command("prune", _prune, "remove weights that no stage starts from, and leftover files")
    pruning.add_argument(
        "--keep", choices=get_args(Keep), default="needed", help="whose weights stay (default: needed)"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only report what would be removed")
    pruning.add_argument("--quarantine", action="store_true", help="also remove damaged stages that were set aside")
    command("verify", _verify, "check every digest, and set damaged stages aside")
    return parser


def _summary(pruned: Pruned) -> str:
    begun = sum(path.startswith(UNFINISHED) for path in pruned.leftovers)
    states = f"; files of checkpoints and failures that nothing needs, {begun}" if begun else ""
    others = f"leftover files, {len(pruned.leftovers) - begun}"
    return f"weights that nothing starts from, {len(pruned.stages)}{states}; {others}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
