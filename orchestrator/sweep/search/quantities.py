"""Quantities of a network that a search can make small: sizes, measured latency, training cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.compare.deployment_points import hardware_of, headline
from orchestrator.compare.trial_rows import training_macs_until
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, TrialSpec

MEASURED: Mapping[str, str] = {"bytes": "deploy/bytes", "latency": "deploy/latency_ms"}
"""Quantity of a deployed network -> its figure, in the first format at the first batch size."""
DEPLOYED = "deployed"
"""Primary metric on validation of a network that is deployed in a format that changes outputs."""


def quantity(
    plan: Plan, records: Mapping[str, StageRecord], trial: TrialSpec, record: StageRecord, name: str
) -> float | None:
    """Return a quantity of a network; None if it was not measured.

    Args:
        plan: plan of the sweep
        records: stage key -> record
        trial: trial of the network
        record: record of the network
        name: `parameters` or `macs` that remain, `training_macs` from the initialisation, `bytes`, `latency` or
            `DEPLOYED` of the network at the trial's end
    """
    if name == "parameters":
        return float(record.remaining_parameters)
    if name == "macs":
        return record.macs_remaining if record.macs else None
    if name == "training_macs":
        spent = training_macs_until(plan, records, trial, record.key)
        return None if spent is None else float(spent)
    if record.key != trial.stages[-1]:
        return None
    if name == DEPLOYED:
        first = records.get(trial.measured[0]) if trial.measured else None
        return first.figure("val") if first is not None and first.after else None
    return {figure: value for figure, value, _ in headline(trial, records)}.get(MEASURED[name])


def place_of_measurement(trial: TrialSpec) -> Any:
    """Return the first format and batch size of a trial's deployments, and their threads; None without any."""
    deploy = trial.config.get("deploy") or {}
    if not trial.measured or not deploy.get("formats"):
        return None
    return deploy["formats"][0], deploy["batch_sizes"][0], deploy.get("threads")


def machine(records: Mapping[str, StageRecord], trial: TrialSpec) -> str:
    """Return the hardware of a trial's first measurement; empty if there is none."""
    first = records.get(trial.measured[0]) if trial.measured else None
    return "" if first is None else hardware_of(first)
