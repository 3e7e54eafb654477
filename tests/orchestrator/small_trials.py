"""Trials as conf/ composes them, planned, and run stage by stage in this process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from composition import composed

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Job, Plan
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.planning.plan import make_plan
from orchestrator.store.store import Store

SMALL = (
    *("schedule=one_shot", "schedule.sparsity=0.5", "train.epochs=3", "train.batch_size=8", "finetune.epochs=1"),
    "train.optimizer.lr=0.05",
)


def small(*overrides: str) -> dict[str, Any]:
    """Return the configuration of a trial of a moment: one round, sixty examples, a network of one hidden layer."""
    own = {"model": "small_workloads.normed", "data": "small_workloads.classification_data"}
    return composed(*SMALL, *overrides) | {part: {"_target_": target, "name": part} for part, target in own.items()}


def planned(*configs: Mapping[str, Any]) -> Plan:
    """Return the plan of these trials."""
    return make_plan([Job((f"trial={index}",), each) for index, each in enumerate(configs)])


def train(plan: Plan, store: Store) -> dict[str, StageRecord]:
    """Run all stages of a plan; return their records by key."""
    records = {}
    for keys in plan.segments():
        order = WorkOrder(
            tuple(plan.stages[key] for key in keys), Worker(store, grace=9), lineage=plan.lineage(keys[0])
        )
        records |= {record.key: record for record in run_segment(order)}
    return records


def bits(record: StageRecord, store: Store) -> list[Any]:
    """Return all of a stage that must be equal in another run."""
    return [record.result(), store.read(record.key, "weights.safetensors"), store.read(record.key, "masks.npz")]
