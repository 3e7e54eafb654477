"""Estimates from earlier sweeps in a store, for the hardware of the new sweep."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from orchestrator.config.cluster import Cluster
from orchestrator.config.sources import module_file
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Forecast, PastSearch
from orchestrator.core.plain_data import read_as
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, StageSpec
from orchestrator.execution.on_ray.embedded_ray import address_of
from orchestrator.execution.placement import slots
from orchestrator.planning.forecast import forecast
from orchestrator.planning.number_formats import counted
from orchestrator.planning.pace import Comparable, Pace, gpu_models, places, processor_model
from orchestrator.store import saved_sweep
from orchestrator.store.store import Store
from orchestrator.sweep.search.building import search_digest, searches

MOST_SWEEPS, MOST_SECONDS = 30, 2.0
"""Maximum number of recent sweeps to read, and the maximum seconds for that."""
MOST_ALIKE, ENOUGH, MOST_RECORDS = 12, 3, 400
"""Records of similar stages: the maximum that is read, the number that is enough; and the maximum of all records."""


def estimated(store: Store, plan: Plan, finished: Mapping[str, StageRecord]) -> tuple[Pace, Forecast]:
    """Return the pace of finished stages, and a forecast of the unfinished stages of a sweep."""
    config = plan.trials[0].config
    cluster, here = Cluster(**config["cluster"]), _hardware(config["cluster"])
    pace, basis = Pace(), "no stage is left to run"
    if any(key not in finished for key in plan.stages):
        pace, basis = _learned(store, plan, finished, here)
    made = forecast(
        plan, finished, pace, made=time.time(), slots=_at_once(cluster), keep=config["store"]["keep"], basis=basis
    )
    if pace.learned and made.work.unknown == made.stages:
        made = replace(made, basis="no stage of this network, device, threads and precision has finished")
    return pace, made


def earlier_forecast(store: Store, name: str) -> Forecast | None:
    """Return the forecast of the last run of a sweep that had stages to run; None if unknown."""
    try:
        return saved_sweep.read(store, name).info.forecast
    except OrchestratorError:
        return None


def past_searches(store: Store, name: str, config: Mapping[str, Any]) -> dict[str, PastSearch]:
    """Return the searches that a sweep has had, and the one that begins now, by the digests of their settings.

    The same search again gets the networks that were excluded at its start. Another one excludes all networks that any
    search in the store has seen.

    Args:
        store: store with the saved sweeps
        name: name of the sweep
        config: configuration of the sweep
    """
    found = _searches_of(store, name)
    if searches(config) and (own := search_digest(config)) not in found:
        every = [each for other in store.sweeps() for each in _searches_of(store, other).values()]
        found[own] = PastSearch(tuple(sorted({key for each in every for key in each.seen})), ())
    return found


def edited_sources(store: Store, name: str, plan: Plan, finished: Container[str]) -> list[str]:
    """Return a line for each own module or file that was edited since the sweep's last run, with what runs again."""
    now, before = _sources(plan.stages.values()), dict[str, str]()
    if now and name in store.sweeps():
        with suppress(OrchestratorError):  # of another release, or damaged: other readers report it
            before = _sources(saved_sweep.plan_of(store, name).stages.values())
    lines = []
    for each, digest in now.items():
        if before.get(each, digest) == digest:
            continue
        below: set[str] = set()
        for key, spec in plan.stages.items():
            if each in _sources([spec]) or not below.isdisjoint(plan.needs(key)):
                below.add(key)
        again, edited = sum(key not in finished for key in below), module_file(each) or each
        lines.append(f"{edited} was edited since the last run of this sweep: {counted(again, 'stage')} run again")
    return lines


def _sources(specs: Iterable[StageSpec]) -> dict[str, str]:
    """Return name of an own module, package or file -> digest of its content."""
    sources = {id(each): each for spec in specs if (each := spec.fields.get("sources"))}  # stages share them
    return {name: digest for each in sources.values() for kind in each.values() for name, digest in kind.items()}


def continuing(store: Store, name: str, plan: Plan) -> Plan:
    """Return a plan whose rounds also continue from the parts that an earlier search of the sweep has trained."""
    try:
        earlier = saved_sweep.plan_of(store, name).stages
    except OrchestratorError:  # of another release, or damaged: other readers report it
        return plan
    known = {key: earlier[key].starts_from for key in plan.stages if key in earlier and earlier[key].starts_from}
    more = {
        key: replace(plan.stages[key], starts_from=tuple(dict.fromkeys((*plan.stages[key].starts_from, *starts))))
        for key, starts in known.items()
    }
    return replace(plan, stages={**plan.stages, **more})


def _searches_of(store: Store, name: str) -> dict[str, PastSearch]:
    try:
        data = store.load_sweep(name) if name in store.sweeps() else {}
        with store.reading_sweep(name):
            return {key: read_as(PastSearch, each) for key, each in data.get("searches", {}).items()}
    except OrchestratorError:  # of another release, or damaged: other readers report it
        return {}


def _learned(store: Store, plan: Plan, finished: Mapping[str, StageRecord], here: str | None) -> tuple[Pace, str]:
    """Return the pace of finished stages on one hardware, and its source: `here`, else the newest stage's hardware."""
    found = _alike(store, plan, finished)
    found.sort(key=lambda each: -each[1].started)
    names = dict.fromkeys(computed_on(record) for _, record in found)
    where = here or next(filter(None, names), None)
    pace = Pace()
    for place, record in found:
        if where and computed_on(record) == where:
            pace.learn(place, record)
    others = " and ".join(sorted(name for name in names if name and name != where))
    if pace.learned:
        assumed = "" if here else "; the hardware of this run is not known yet"
        return pace, f"from {counted(pace.learned, 'finished stage')} on {where}{assumed}"
    wanted = "of this network and data in these batches has finished"
    if others:
        return pace, f"no stage {wanted} on {here}, only on {others}"
    return pace, f"no stage {wanted} in this store with as many threads"


def _alike(store: Store, plan: Plan, finished: Mapping[str, StageRecord]) -> list[tuple[Comparable, StageRecord]]:
    """Return finished stages with the same batches as unfinished ones: of this plan, then of recent sweeps."""
    own = places(plan)
    left = {own[key] for key in plan.stages if key not in finished}
    batches, counts = {place.batches for place in left}, Counter[str]()
    found: dict[str, tuple[Comparable, StageRecord]] = {}

    def chosen(where: Mapping[str, Comparable], known: Container[str]) -> dict[str, Comparable]:
        picked, planned = {}, counts.copy()  # counts planned stages, some of which may not have finished
        for key, place in where.items():
            if key in known or place.batches not in batches or planned[place.alike] >= MOST_ALIKE:
                continue
            planned[place.alike] += 1
            picked[key] = place
            if len(found) + len(picked) >= MOST_RECORDS:
                break
        return picked

    def learn(where: Mapping[str, Comparable], records: Mapping[str, StageRecord]) -> None:
        found.update({key: (where[key], record) for key, record in records.items()})
        counts.update(where[key].alike for key in records)

    here = chosen({key: own[key] for key in finished if key in own}, ())
    learn(here, {key: finished[key] for key in here})
    until = time.monotonic() + MOST_SECONDS
    for name in _newest(store)[:MOST_SWEEPS]:
        if time.monotonic() > until or all(counts[place.alike] >= ENOUGH for place in left):
            break
        try:
            others = chosen(places(saved_sweep.plan_of(store, name)), found.keys() | own.keys())
            learn(others, store.finished(others))
        except OrchestratorError:  # of another release, or damaged: other readers report it
            continue
    return list(found.values())


def _newest(store: Store) -> list[str]:
    """Return the names of all sweeps, the newest first."""
    saved = {
        entry.path.removeprefix("sweeps/").removesuffix(".json"): entry.modified
        for entry in store.backend.entries("sweeps")
    }
    return sorted(store.sweeps(), key=lambda name: -saved.get(name, 0.0))


def computed_on(record: StageRecord) -> str | None:
    """Return the model of the processor or GPU of a stage; None if its record does not tell."""
    if record.device.startswith("cuda"):
        return record.environment.get("gpu")
    return record.environment.get("processor", "").rpartition(", ")[0] or None


def _hardware(cluster: Mapping[str, Any]) -> str | None:
    """Return the model of the processor or GPU of a sweep; None if unknown before the sweep has connected."""
    if not _here(Cluster(**cluster)):
        return None
    if cluster["gpus_per_trial"]:
        return next(iter(gpu_models()), None)
    return processor_model()


def _at_once(cluster: Cluster) -> int | None:
    """Return the number of stages that run at once; None if unknown before the sweep has connected."""
    if cluster.kind == "inline":
        return 1
    if not _here(cluster):
        return None
    here = {"CPU": float(cluster.num_cpus or os.cpu_count() or 1), "GPU": float(len(gpu_models()))}
    wanted = {"CPU": cluster.cpus_per_trial, "GPU": cluster.gpus_per_trial}
    fitting = slots({name: amount for name, amount in wanted.items() if amount}, [here])
    return min(fitting, cluster.max_concurrent or fitting) or None


def _here(cluster: Cluster) -> bool:
    return cluster.kind == "inline" or (address_of(cluster).own and not cluster.autoscaling)
