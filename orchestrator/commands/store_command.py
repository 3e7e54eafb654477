"""`python -m orchestrator.store COMMAND`: look after a store. Nothing that a store names is run or imported."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import get_args

from orchestrator.commands.arguments import (
    CommandParser,
    add_store,
    file_system,
    list_store,
    open_store,
)
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import byte_size, first_few
from orchestrator.store import saved_sweep
from orchestrator.store.backends import given_as, named_as
from orchestrator.store.retention import UNFINISHED, Pruned, prune, sizes, verify
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.store.store import Keep, Store
from orchestrator.views.terminal.stage_lines import checkpointed
from orchestrator.views.terminal.standard_streams import say, show_what_can_be_shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `python -m orchestrator.store`; return the exit status: 2 for a mistake, 1 where something is amiss."""
    show_what_can_be_shown()
    options = _parser().parse_args(arguments)
    try:
        with given_as("--store"):
            store = open_store(options, keep=getattr(options, "keep", "needed"))
            if "sweep" in options:
                (options.sweep,) = saved_sweep.chosen_sweeps(store.sweeps(), [options.sweep], str(store))
            status: int = options.run(store, options)
    except OrchestratorError as error:
        say(error, amiss=True)
        return 2
    return status


def _list(store: Store, _: argparse.Namespace) -> int:
    return list_store(store)


def _show(store: Store, options: argparse.Namespace) -> int:
    sweep = saved_sweep.load(store, options.sweep)
    plan, records, held = sweep.plan, sweep.records, _held(store, sweep.plan.stages)
    finished = [keys for keys in plan.work if all(key in records for key in keys)]
    alone = set(saved_sweep.only_of(store, options.sweep))
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
    """Return why trials have not finished -> their names."""
    plan, found = sweep.plan, dict[str, list[str]]()
    begun = {
        key: checkpointed(plan.stages[key], step, store.checkpoints.curve(key))
        for key, step in store.checkpoints.steps(plan.stages.keys() - sweep.records.keys()).items()
    }
    for trial, keys in zip(plan.trials, plan.work, strict=True):
        missing = [key for key in keys if key not in sweep.records]
        if missing:
            trained = not any(KINDS[plan.stages[key].kind].trains for key in missing)
            told = [each[key] for each in (sweep.failures, begun) for key in missing if key in each]
            reason = told[0] if told else "trained, not measured" if trained else "not run"
            found.setdefault(reason, []).append(trial.name)
    return found


def _held(store: Store, keys: Collection[str]) -> dict[str, int]:
    """Return path -> bytes of what the store holds of stages: their files and, of those under way, their states."""
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
    """Ask whether to delete; raise OrchestratorError if standard input is no terminal and holds no answer."""
    with suppress(EOFError):
        answer = input("Delete them? Only training brings them back. MLflow stays as it is. [y/N] ").strip().lower()
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
        say(f"{category:<20}{files:>10} files{byte_size(size):>12}")
    say(f"{len(store.stages.known())} stages, {len(store.sweeps())} sweeps (`list` names them)")
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
    """Say which saved sweeps cannot be read, and what follows; return the exit status."""
    for damage in pruned.damages:
        say(f"{named_as('--store', damage)}. No weights can be dropped until then: it might need any.", amiss=True)
    return 1 if pruned.damages else 0


def _verify(store: Store, _: argparse.Namespace) -> int:
    stages = len(store.stages.known())
    damages = verify(store)
    for damage in damages:
        say(named_as("--store", damage), amiss=True)
    say(f"{stages - len(damages)} of {stages} stages are intact")
    return 1 if damages else 0


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="python -m orchestrator.store", description="Look after a store.")
    commands = parser.add_subparsers(dest="command", required=True)

    def command(
        name: str, run: Callable[[Store, argparse.Namespace], int], text: str, sweep: bool = False
    ) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.set_defaults(run=run)
        if sweep:
            added.add_argument("sweep", metavar="SWEEP", help="a sweep, or how its name begins")
        add_store(added)
        return added

    command("list", _list, "list its sweeps: when saved, status, size, command")
    command("show", _show, "say what a sweep is, what it holds and what is missing", sweep=True)
    deleting = command("delete", _delete, "remove a sweep and what no other sweep needs; MLflow stays", sweep=True)
    deleting.add_argument("--yes", action="store_true", help="do not ask")
    copying = command("copy", _copy, "copy a sweep to another store, every file verified", sweep=True)
    copying.add_argument("target", metavar="URI", help="the other store")
    copying.add_argument(
        "--target-option", action="append", default=[], metavar="KEY=VALUE", help="of the other store's file system"
    )
    command("report", _report, "say what takes how much room")
    pruning = command("prune", _prune, "remove weights that nothing starts from, and leftovers")
    pruning.add_argument(
        "--keep", choices=get_args(Keep), default="needed", help="whose weights stay (default: needed)"
    )
    pruning.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    pruning.add_argument("--quarantine", action="store_true", help="remove damaged stages that were set aside as well")
    command("verify", _verify, "check every digest; damaged stages are set aside")
    return parser


def _summary(pruned: Pruned) -> str:
    begun = sum(path.startswith(UNFINISHED) for path in pruned.leftovers)
    states = f"; files of checkpoints and failures that nothing needs, {begun}" if begun else ""
    others = f"leftover files, {len(pruned.leftovers) - begun}"
    return f"weights that nothing starts from, {len(pruned.stages)}{states}; {others}"


def _time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
