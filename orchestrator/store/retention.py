"""What a store keeps: a report of its sizes, and the removal of weights that nothing starts from any more."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from orchestrator.config.cluster import to_bytes
from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.file_names import DROPPABLE, RECORD, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import logger
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.store import saved_sweep
from orchestrator.store.backends import Entry
from orchestrator.store.store import Store

LEFTOVER_SECONDS = 24 * 3600.0
"""How old a file must be to be the leftover of a process that died, rather than the work of one that runs."""
UNFINISHED = ("checkpoints/", "failures/")
"""Where it is kept how far stages have come, and how they failed."""

_log = logger(__name__)


@dataclass(frozen=True)
class Pruned:
    """What `prune` removed, or would remove: stages that lost their weights, leftover files, and bytes of both.

    `damages` are saved sweeps that cannot be read. They might need any weights, so that none are removed then.
    """

    stages: tuple[str, ...]
    leftovers: tuple[str, ...]
    bytes: int
    damages: tuple[str, ...] = ()


def sizes(store: Store) -> dict[str, tuple[int, int]]:
    """Return category -> (number of files, their bytes): records, weights, masks and others, sweeps, quarantine, ..."""
    found: dict[str, tuple[int, int]] = {}
    for entry in store.backend.entries():
        files, size = found.get(category := _category(entry.path), (0, 0))
        found[category] = (files + 1, size + entry.bytes)
    return found


def needed_weights(records: Mapping[str, StageRecord | StageSpec], plans: Iterable[Plan]) -> set[str]:
    """Return the finished stages, or specs of what will be, from whose weights something starts, or which are results.

    They are dense stages, the ends of trials, rounds with no stage or several below them, and all that an unfinished
    stage starts from, or may go on from to save work. Branches are counted over everything in the store and the plans.
    """
    children: dict[str, set[str]] = defaultdict(set)
    for key, record in records.items():
        for needed in record.inputs.values():
            children[needed].add(key)
    ends: set[str] = set()
    for plan in plans:
        ends.update(trial.stages[-1] for trial in plan.trials)
        for key, spec in plan.stages.items():
            for needed in (*spec.inputs.values(), *spec.starts_from):
                children[needed].add(key)
    branches = {key for key, record in records.items() if KINDS[record.kind].keeps == "at_branches"}
    return {
        key
        for key, record in records.items()
        if KINDS[record.kind].keeps == "always"
        or key in ends
        or (key in branches and len(children[key]) != 1)
        or not children[key] <= records.keys()
    }


def prune(store: Store, plans: Iterable[Plan] = (), dry_run: bool = False) -> Pruned:
    """Remove the weights that `store.keep` does not ask for, and what processes that died left behind.

    With `store.keep=all` that is as many of the weights that nothing starts from as are above `store.max_bytes`. Masks
    and records always stay. The plans of all sweeps saved in the store count, so that none loses what it needs to go
    on; a sweep is therefore saved before it runs.

    Args:
        store: whose `keep` is the policy
        plans: further plans whose needs count
        dry_run: only say what would be removed
    """
    store = replace(store, read_only=dry_run)
    entries = list(store.backend.entries())
    commits = store.stages.all_standing(store.stages.known())
    records = {key: commit.record for key, commit in commits.items()}
    unfinished = any(entry.path.startswith(UNFINISHED) for entry in entries)
    asks = unfinished or store.keep != "all" or store.max_bytes is not None
    saved, damages = saved_plans(store) if asks else ([], [])
    needed = set(records) if damages else needed_weights(records, [*saved, *plans])
    idle = [key for key, record in records.items() if WEIGHTS in record.files and key not in needed]
    belonging = {path for commit in commits.values() for path in commit.paths}
    leftovers = _left_behind(entries, belonging)
    leftovers |= _idle(entries, records, [*saved, *plans], damages)
    if store.keep == "all":  # only as far as `max_bytes` asks, the oldest first
        room = math.inf if store.max_bytes is None else to_bytes(store.max_bytes)
        idle = _oldest(idle, records, sum(entry.bytes for entry in entries) - sum(leftovers.values()) - room)
    if not dry_run:
        store.drop_weights(idle)
        for path in leftovers:
            _remove(store, path)
    freed = sum(_droppable(records[key]) for key in idle) + sum(leftovers.values())
    return Pruned(tuple(sorted(idle)), tuple(sorted(leftovers)), freed, tuple(damages))


def _left_behind(entries: Collection[Entry], belonging: Collection[str]) -> dict[str, int]:
    """Return path -> bytes of what processes that died left behind: old, and not `belonging` to a finished stage.

    Leases stay while any driver lives, which renews its own file and not those of what it holds.
    """
    before = time.time() - LEFTOVER_SECONDS
    owners = [entry for entry in entries if entry.path.startswith("leases/owners/") and entry.path.endswith(".json")]
    leases = ["leases/"] if all(owner.modified < before for owner in owners) else []
    folders = ("tmp/", "probes/", "preflights/", *leases)
    return {
        entry.path: entry.bytes
        for entry in entries
        if entry.modified < before
        and (entry.path.startswith(folders) or (entry.path.startswith("stages/") and entry.path not in belonging))
    }


def _oldest(idle: Iterable[str], records: Mapping[str, StageRecord], excess: float) -> list[str]:
    """Return those of the stages that were trained first whose weights make up `excess` bytes."""
    found = []
    for key in sorted(idle, key=lambda key: records[key].started):
        if excess <= 0:
            break
        found.append(key)
        excess -= _droppable(records[key])
    return found


def _droppable(record: StageRecord) -> int:
    """Return the bytes of what `drop_weights` takes from a stage."""
    return sum(record.files[name].bytes for name in DROPPABLE if name in record.files)


def _idle(
    entries: Iterable[Entry], finished: Collection[str], plans: Iterable[Plan], damages: Collection[str]
) -> dict[str, int]:
    """Return path -> bytes of checkpoints and failures that nothing asks for: of stages finished, or in no sweep."""
    wanted = {key for plan in plans for key in plan.stages} - set(finished)
    return {
        entry.path: entry.bytes
        for entry in entries
        if entry.path.startswith(UNFINISHED)
        and (key := entry.path.split("/")[1]) not in wanted
        and (key in finished or not damages)
    }


def limit(store: Store, plan: Plan) -> None:
    """Prune a store that is larger than its `max_bytes`; warn where what it must keep is larger still."""
    if store.max_bytes is None:
        return
    most, size = to_bytes(store.max_bytes), sum(entry.bytes for entry in store.backend.entries())
    if size > most and (left := size - prune(store, [plan]).bytes) > most:
        _log.warning(
            "The store has %.1f MB, and `store.max_bytes` (=%s) cannot be kept: records, masks and weights that are "
            "needed always stay. Raise it, or remove sweeps by `python -m orchestrator.store delete`.",
            left / 1e6,
            store.max_bytes,
        )


def prune_sweep(store: Store, plan: Plan, records: Mapping[str, StageRecord]) -> set[str]:
    """Remove the weights of one sweep that `store.keep` does not ask for; return the stages that lost them.

    `prune` does this for a whole store; here only the stages in `records` are looked at.

    Args:
        store: whose `keep` is the policy, and whose other sweeps' needs count
        plan: the sweep that has ended
        records: its finished stages

    Raises:
        StoreError: a saved sweep, which might need any weights, cannot be read; nothing was removed
    """
    store.checkpoints.drop_all(records)  # of stages whose worker was lost between their commit and that
    store.failures.drop_all(records)
    if store.keep == "all":
        return set()
    saved, damages = saved_plans(store)
    if damages:
        raise StoreError("\n".join(damages))
    needed = needed_weights(records, [plan, *saved])
    idle = {key for key, record in records.items() if WEIGHTS in record.files and key not in needed}
    store.drop_weights(idle)
    return idle


def _remove(store: Store, path: str) -> None:
    top, name, *rest = path.split("/")
    if top == "tmp" and rest:
        store.backend.remove_folder(f"tmp/{name}")
    else:
        store.backend.remove(path)


def verify(store: Store) -> list[str]:
    """Read every file of every stage; return a sentence for each damaged stage, all of which are then set aside."""
    damages = []
    for key in store.stages.known():
        try:
            store.stages.check(key)
        except StoreError as error:
            damages.append(str(error))
    return damages


def saved_plans(store: Store) -> tuple[list[Plan], list[str]]:
    """Return the plans of the sweeps saved in a store, and what is wrong with those that cannot be read."""
    plans, damages = [], []
    for name in store.sweeps():
        try:
            plans.append(saved_sweep.plan_of(store, name))
        except OrchestratorError as error:
            damages.append(str(error))
    return plans, damages


def _category(path: str) -> str:
    top = path.split("/", 1)[0]
    if top != "stages":
        if top in ("tmp", "probes", "leases"):
            return "running or leftover"
        return top if top in ("checkpoints", "failures", "sweeps", "quarantine", "preflights") else "other"
    name = path.rpartition("/")[2]
    return {RECORD: "records", **dict.fromkeys(DROPPABLE, "weights")}.get(name, "masks and others")
