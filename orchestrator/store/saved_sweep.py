"""A sweep as the store saves it: enough to rebuild its comparison and its view without the configuration behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import SweepInfo
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
            f"the sweep {name!r} was saved in format {data.get('format')!r}, this release reads {FORMAT}; "
            "use the release that wrote it, or run the sweep again: finished stages are kept"
        )
    plan = Plan.from_json(data["plan"])
    info = SweepInfo(name, data["config"], data["command"], data["environment"])
    return SavedSweep(info, plan, store.finished(plan.stages), data["failures"])
