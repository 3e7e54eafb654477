"""Retention in a store: report sizes, prune weights and leftover files, and verify stages."""

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
"""Age in seconds from which a temporary file counts as the leftover of a dead process, not as work in progress."""
UNFINISHED = ("checkpoints/", "failures/")
"""Folders of unfinished stages."""

_log = logger(__name__)


@dataclass(frozen=True)
class Pruned:
    """Result of `prune`: stages that lost their weights, leftover files, and the bytes of both.

    `damages` describes saved sweeps that cannot be read. Such a sweep might need any weights, so none are removed.
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
    """Return the keys of the stages whose weights are needed: as results, or because other stages start from them.

    These are dense stages, the ends of trials, rounds with no stage or several stages below them, and all stages that
    an unfinished stage starts from, or may continue from to save work. Branches are counted over the whole store and
    all plans.

    Args:
        records: key -> finished stage, or spec of a planned one
        plans: plans whose unfinished stages count
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
    """Remove the weights that `store.keep` does not ask for, and the leftovers of dead processes.

    With `store.keep=all`, weights are removed only while the store is larger than `store.max_bytes`: those that no
    stage starts from, the oldest first. Masks and records always stay. No sweep saved in the store loses weights that
    it needs to continue, which is why a sweep is saved before it runs.

    Args:
        store: the store; its `keep` is the policy
        plans: plans whose needs count, beside those of the saved sweeps
        dry_run: remove nothing, only return what would be removed
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
    if store.keep == "all":
        room = math.inf if store.max_bytes is None else to_bytes(store.max_bytes)
        idle = _oldest(idle, records, sum(entry.bytes for entry in entries) - sum(leftovers.values()) - room)
    if not dry_run:
        store.drop_weights(idle)
        for path in leftovers:
            _remove(store, path)
    freed = sum(_droppable(records[key]) for key in idle) + sum(leftovers.values())
    return Pruned(tuple(sorted(idle)), tuple(sorted(leftovers)), freed, tuple(damages))


def _left_behind(entries: Collection[Entry], belonging: Collection[str]) -> dict[str, int]:
    """Return path -> bytes of files that dead processes left: old ones that do not belong to a finished stage.

    Leases stay while any driver is alive: a driver renews its heartbeat and not the files of its leases.
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
    """Return the stages that were trained first, as many as it takes to free `excess` bytes of weights."""
    found = []
    for key in sorted(idle, key=lambda key: records[key].started):
        if excess <= 0:
            break
        found.append(key)
        excess -= _droppable(records[key])
    return found


def _droppable(record: StageRecord) -> int:
    """Return the number of bytes that `drop_weights` frees in a stage."""
    return sum(record.files[name].bytes for name in DROPPABLE if name in record.files)


def _idle(
    entries: Iterable[Entry], finished: Collection[str], plans: Iterable[Plan], damages: Collection[str]
) -> dict[str, int]:
    """Return path -> bytes of checkpoints and failures that are not needed: their stage is finished, or in no sweep."""
    wanted = {key for plan in plans for key in plan.stages} - set(finished)
    return {
        entry.path: entry.bytes
        for entry in entries
        if entry.path.startswith(UNFINISHED)
        and (key := entry.path.split("/")[1]) not in wanted
        and (key in finished or not damages)
    }


def limit(store: Store, plan: Plan) -> None:
    """Prune a store that is larger than its `max_bytes`; warn if the remaining files still exceed the limit."""
    if store.max_bytes is None:
        return
    most, size = to_bytes(store.max_bytes), sum(entry.bytes for entry in store.backend.entries())
    if size > most and (left := size - prune(store, [plan]).bytes) > most:
        _log.warning(
            "The store has %.1f MB, more than `store.max_bytes` (=%s): records, masks and needed weights always stay. "
            "Raise `store.max_bytes`, or remove sweeps with `python -m orchestrator.store delete`.",
            left / 1e6,
            store.max_bytes,
        )


def prune_sweep(store: Store, plan: Plan, records: Mapping[str, StageRecord]) -> set[str]:
    """Remove the weights of one sweep that `store.keep` does not ask for; return those of `records` that lost them.

    `prune` does this for a whole store; this function only looks at the stages in `records`.

    Args:
        store: the store; its `keep` is the policy, and weights that its other sweeps need stay
        plan: plan of the sweep that has ended
        records: its finished stages

    Raises:
        StoreError: a saved sweep, which might need any weights, cannot be read; no weights were removed
    """
    store.checkpoints.drop_all(records)  # a worker that is lost after a commit leaves its checkpoint behind
    store.failures.drop_all(records)
    if store.keep == "all":
        return set()
    saved, damages = saved_plans(store)
    if damages:
        raise StoreError("\n".join(damages))
    known = {**store.finished(plan.belonging.keys() - plan.stages.keys()), **records}
    needed = needed_weights(known, [plan, *saved])
    idle = {key for key, record in known.items() if WEIGHTS in record.files and key not in needed}
    store.drop_weights(idle)
    return idle & records.keys()


def _remove(store: Store, path: str) -> None:
    top, name, *rest = path.split("/")
    if top == "tmp" and rest:
        store.backend.remove_folder(f"tmp/{name}")
    else:
        store.backend.remove(path)


def verify(store: Store) -> list[str]:
    """Read every file of every stage; set damaged stages aside and return a sentence for each."""
    damages = []
    for key in store.stages.known():
        try:
            store.stages.check(key)
        except StoreError as error:
            damages.append(str(error))
    return damages


def saved_plans(store: Store) -> tuple[list[Plan], list[str]]:
    """Return the plans of the sweeps saved in a store, and a message for each sweep that cannot be read."""
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
