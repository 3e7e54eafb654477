"""Saved sweeps: load, list, delete and copy them. A saved sweep can be compared and shown without its config files."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from orchestrator.core.errors import OrchestratorError, StoreError
from orchestrator.core.events import Decision, Forecast, PastSearch, SweepInfo
from orchestrator.core.file_names import RECORD, WEIGHTS
from orchestrator.core.plain_data import Count, Margin, quoted, read_as
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import Plan

if TYPE_CHECKING:
    from orchestrator.store.store import Store

FORMAT = 2
"""Number of the format, raised with every change; other formats are refused."""

OF_STAGES = ("stages", "checkpoints", "failures")
"""Folders of a store in which each stage has an entry under its key."""


@dataclass(frozen=True)
class SavedSweep:
    """A saved sweep: its plan, the records of its finished stages, and its failures (stage key -> reason)."""

    info: SweepInfo
    plan: Plan
    records: Mapping[str, StageRecord] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    search: Decision | None = None
    """Last decision of the sweep's search; None without a search."""
    searches: Mapping[str, PastSearch] = field(default_factory=dict)
    """Digest of its settings -> each search that this sweep has had."""

    def settled(self, finished: Container[str]) -> bool:
        """Return whether each trial has its stages among `finished`, or was stopped by a search that has ended."""
        stopped = self.search.stopped if self.search is not None and self.search.ended else ()
        works = zip(self.plan.trials, self.plan.work, strict=True)
        return all(trial.name in stopped or all(key in finished for key in work) for trial, work in works)


@dataclass(frozen=True)
class _Manifest:
    """The data that `manifest` made; checks types when it is read."""

    config: Mapping[str, Any]
    command: str
    environment: Mapping[str, str]
    plan: Mapping[str, Any]
    failures: Mapping[str, str]
    forecast: Forecast | None = None
    search: Decision | None = None
    searches: Mapping[str, PastSearch] = field(default_factory=dict)


@dataclass(frozen=True)
class _Compare:
    margin: Margin | None = None


@dataclass(frozen=True)
class _Config:
    """The parts of a trial's configuration that are read by name; checks their types."""

    method: Mapping[str, Any]
    schedule: Mapping[str, Any]
    seed: Count = 0
    compare: _Compare = field(default_factory=_Compare)
    model: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    score: Mapping[str, Any] = field(default_factory=dict)
    restart: Mapping[str, Any] = field(default_factory=dict)


def manifest(
    info: SweepInfo,
    plan: Plan,
    failures: Mapping[str, str] | None = None,
    search: Decision | None = None,
    searches: Mapping[str, PastSearch] | None = None,
) -> dict[str, Any]:
    """Return a sweep as plain data for `Store.save_sweep`; secrets in its plan are left out."""
    return {
        "format": FORMAT,
        "config": info.config,
        "command": info.command,
        "environment": info.environment,
        "plan": redact_tree(plan.to_json()),
        "failures": failures or {},
        "forecast": None if info.forecast is None else asdict(info.forecast),
        **({} if search is None else {"search": asdict(search)}),
        **({"searches": {name: asdict(each) for name, each in searches.items()}} if searches else {}),
    }


def load(store: Store, name: str) -> SavedSweep:
    """Return the sweep saved as `name`, with the records of its finished stages; raise as `read` does."""
    sweep = read(store, name)
    records = store.finished(sweep.plan.stages)
    return replace(sweep, records=records, failures={**_set_aside(store, sweep.plan, records), **sweep.failures})


def read(store: Store, name: str) -> SavedSweep:
    """Return the sweep saved as `name`, without records.

    Raises:
        StoreError: the store holds no such sweep, or its file is damaged
        OrchestratorError: another release saved it
    """
    data = store.load_sweep(name)
    if data.get("format") != FORMAT:
        raise OrchestratorError(
            f"the sweep {name!r} was saved in format {quoted(data.get('format'))}, and this release reads {FORMAT}; "
            "use the release that wrote it, or run the sweep again: finished stages are kept"
        )
    with store.reading_sweep(name):
        saved: _Manifest = read_as(_Manifest, data)
        plan = Plan.from_json(saved.plan)
        for trial in plan.trials:
            read_as(_Config, trial.config)
    info = SweepInfo(name, saved.config, saved.command, saved.environment, saved.forecast)
    return SavedSweep(info, plan, failures=saved.failures, search=saved.search, searches=saved.searches)


def plan_of(store: Store, name: str) -> Plan:
    """Return the plan of the sweep saved as `name`; raise StoreError if it cannot be read."""
    with store.reading_sweep(name):
        return Plan.from_json(store.load_sweep(name).get("plan", {}))


def _set_aside(store: Store, plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, str]:
    """Return stage key -> reason for the stages of a plan that are missing because they were found damaged."""
    damaged = {name.rpartition("-")[0] for name in store.backend.names("quarantine")}
    reason = "it was damaged and was set aside in the store's quarantine/; run the sweep again to repeat it"
    return {key: reason for key in plan.stages if key in damaged and key not in records}


@dataclass(frozen=True)
class Summary:
    """One line about a saved sweep: the time of its last save, its status, the bytes of its stages and checkpoints.

    `saved` is None for a link, which is not followed.
    """

    name: str
    saved: float | None
    status: str
    trials: int = 0
    finished: int = 0
    bytes: int = 0
    command: str = ""


def summaries(store: Store) -> list[Summary]:
    """Return a summary of each sweep in a store, the last saved first; no record is read."""
    sizes: dict[str, int] = {}
    done, saved = set[str](), dict[str, float]()
    for entry in store.backend.entries():
        top, _, rest = entry.path.partition("/")
        if top in OF_STAGES:
            key, _, name = rest.partition("/")
            sizes[key] = sizes.get(key, 0) + entry.bytes
            done.update({key} if name == RECORD else ())
        elif top == "sweeps":
            saved[rest.removesuffix(".json")] = entry.modified
    found = []
    for name in store.sweeps():
        try:
            sweep = read(store, name)
        except OrchestratorError:
            found.append(Summary(name, saved.get(name), "damaged" if name in saved else "a link"))
            continue
        finished = [done.issuperset(keys) for keys in sweep.plan.work]
        found.append(
            Summary(
                name,
                saved.get(name, 0.0),
                status_of(store, sweep, sweep.settled(done)),
                len(finished),
                sum(finished),
                sum(sizes.get(key, 0) for key in sweep.plan.belonging),
                sweep.info.command,
            )
        )
    return sorted(found, key=lambda summary: -(summary.saved or 0.0))


def status_of(store: Store, sweep: SavedSweep, finished: bool) -> str:
    """Return a sweep's status: running, finished, failed or unfinished; `finished` says whether all its trials are."""
    if leased(store, sweep.plan.stages):
        return "running"
    return "finished" if finished else "failed" if sweep.failures else "unfinished"


def chosen_sweep(store: Store, name: str | None, argument: str = "SWEEP") -> str:
    """Return the full name of the sweep whose name begins with `name`; without a name, the sweep saved last.

    Raises:
        OrchestratorError: no sweep matches, or several do; the message quotes `argument`
    """
    if name is not None:
        return chosen_sweeps(store.sweeps(), [name], str(store), argument)[0]
    found = summaries(store)
    if not found:
        raise OrchestratorError(f"{store} holds no sweeps; run one, or name another store")
    return found[0].name


def chosen_sweeps(known: Sequence[str], names: Sequence[str], where: str, argument: str = "SWEEP") -> list[str]:
    """Return the full names of the sweeps whose names begin with `names`; raise as `chosen_sweep` does."""
    chosen = []
    for name in names:
        matches = [name] if name in known else [other for other in known if name and other.startswith(name)]
        if len(matches) > 1:
            raise OrchestratorError(
                f"`{argument}` (={name!r}) matches several sweeps, {', '.join(matches)}; type more of the name"
            )
        if not matches:
            stems = {other: other.rpartition("-")[0] for other in known}  # without the digest at the end
            near = get_close_matches(name, [*known, *stems.values()])
            close = [other for other in known if other in near or stems[other] in near][:3]
            meant = f"did you mean {' or '.join(close)}? " if close else ""
            raise OrchestratorError(
                f"`{argument}` (={name!r}) does not exist; {meant}{where} holds: {', '.join(known) or 'none'}"
            )
        chosen += matches
    return chosen


def leased(store: Store, keys: Collection[str]) -> list[str]:
    """Return the live drivers that hold a lease on any of these stages."""
    leases = store.leases()
    held = {name.partition("@")[0] for name in store.backend.names("leases/stages")}.intersection(keys)
    return sorted({owner for key in held if (owner := leases.holder(key)) is not None})


def only_of(store: Store, name: str) -> list[str]:
    """Return the stages that are in no other saved sweep's plan, children before their parents.

    Raises:
        StoreError: another sweep cannot be read, so any stage might belong to it
    """
    others = {key for other in store.sweeps() if other != name for key in plan_of(store, other).belonging}
    try:
        return [key for key in reversed(plan_of(store, name).belonging) if key not in others]
    except StoreError:  # the sweep's own file is damaged, so its stages are unknown
        return []


def delete(store: Store, name: str) -> None:
    """Remove a sweep and its stages that no other sweep needs. The sweep goes last, so an interrupted call can go on.

    Raises:
        StoreError: one of these stages is being trained, or another sweep cannot be read; nothing was removed then
    """
    keys = only_of(store, name)
    if drivers := leased(store, keys):
        raise StoreError(f"{name} is being trained by {', '.join(drivers)}; stop that process, or wait until it ends")
    for key in keys:
        store.discard(key)
    store.remove_sweep(name)


def copy(store: Store, name: str, target: Store) -> int:
    """Copy a sweep and its finished stages, with every file verified on both sides; return the number of stages copied.

    Stages that the target has already stay as they are. The sweep is saved first, so that no process drops its stages
    from the target, and an interrupted copy can go on.

    Raises:
        StoreError: the target is the store itself, or holds a stage with other weights; nothing was copied then
    """
    sweep = load(store, name)
    if target.uri == store.uri:
        raise StoreError(f"the target (={target}) is the store itself; name another")
    there = target.finished(sweep.plan.stages)
    for key in there.keys() & sweep.records.keys():
        if there[key].weights_digest != sweep.records[key].weights_digest:
            raise StoreError(f"{target} holds stage {key} with other weights; copy to another store")
    target.save_sweep(name, store.load_sweep(name))
    left = [
        record
        for key, record in sweep.records.items()
        if key not in there or (WEIGHTS in record.files and WEIGHTS not in there[key].files)
    ]
    for record in left:
        target.commit(record, {file: partial(_copy_file, store, record.key, file) for file in record.files})
        target.stages.check(record.key)
    return len(left)


def _copy_file(store: Store, key: str, name: str, file: BinaryIO) -> None:
    with store.fetch(key, name).open("rb") as source:
        shutil.copyfileobj(source, file)
