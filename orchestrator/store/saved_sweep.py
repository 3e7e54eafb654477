"""A sweep as the store saves it: enough to rebuild its comparison and its view without the configuration behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
from orchestrator.core.plain_data import Fraction, read_as, shown
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import Plan

if TYPE_CHECKING:
    from orchestrator.store.store import Store

FORMAT = 1
"""Raised whenever the layout changes; other layouts are refused."""


@dataclass(frozen=True)
class SavedSweep:
    """What a sweep was, what came of it, and which stages failed last time (stage key -> why)."""

    info: SweepInfo
    plan: Plan
    records: Mapping[str, StageRecord] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Manifest:
    """What `manifest` made, as it must be to be read."""

    config: Mapping[str, Any]
    command: str
    environment: Mapping[str, str]
    plan: Mapping[str, Any]
    failures: Mapping[str, str]


@dataclass(frozen=True)
class _Compare:
    margin: Fraction = 0.0


@dataclass(frozen=True)
class _Config:
    """What is read of a trial's configuration by name."""

    seed: int = 0
    compare: _Compare = field(default_factory=_Compare)


def manifest(info: SweepInfo, plan: Plan, failures: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what `Store.save_sweep` is to keep of a sweep: plain data, secrets left out."""
    return {
        "format": FORMAT,
        "config": info.config,
        "command": info.command,
        "environment": info.environment,
        "plan": redact_tree(plan.to_json()),
        "failures": failures or {},
    }


def load(store: Store, name: str) -> SavedSweep:
    """Return the sweep saved as `name`, with the records of its finished stages.

    Raises:
        StoreError: the store holds no such sweep
        OrchestratorError: another release saved it
    """
    data = store.load_sweep(name)
    if data.get("format") != FORMAT:
        raise OrchestratorError(
            f"the sweep {name!r} was saved in format {shown(data.get('format'))}, this release reads {FORMAT}; "
            "use the release that wrote it, or run the sweep again: finished stages are kept"
        )
    with store.reading_sweep(name):
        saved: _Manifest = read_as(_Manifest, data)
        plan = Plan.from_json(saved.plan)
        for trial in plan.trials:
            read_as(_Config, trial.config)
    info = SweepInfo(name, saved.config, saved.command, saved.environment)
    records = store.finished(plan.stages)
    return SavedSweep(info, plan, records, {**_set_aside(store, plan, records), **saved.failures})


def plan_of(store: Store, name: str) -> Plan:
    """Return the plan of the sweep saved as `name`; raise StoreError where it cannot be read."""
    with store.reading_sweep(name):
        return Plan.from_json(store.load_sweep(name).get("plan", {}))


def _set_aside(store: Store, plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, str]:
    """Return a reason for each stage of a plan that is not there because it was found damaged."""
    damaged = {name.rpartition("-")[0] for name in store.backend.names("quarantine")}
    reason = "it was damaged, and set aside in the store's quarantine/; run the sweep again to repeat it"
    return {key: reason for key in plan.stages if key in damaged and key not in records}
