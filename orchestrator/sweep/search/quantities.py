"""Quantities of a network that a search can make small: sizes, measured latency, training cost. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from orchestrator.compare.deployment_points import figures_of, hardware_of, headline
from orchestrator.compare.trial_rows import training_macs_until
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, TrialSpec

MEASURED: Mapping[str, str] = {"bytes": "deploy/bytes", "latency": "deploy/latency_ms"}
"""Quantity of a deployed network -> its figure, in the first format at the first batch size."""
DEPLOYED = "deployed"
"""Primary metric on validation of a network that is deployed in a format that changes outputs."""


class Finished(NamedTuple):
    """A finished network of a trial, and the records from which its figures are read."""

    plan: Plan
    records: Mapping[str, StageRecord]
    trial: TrialSpec
    record: StageRecord

    def figures(self) -> dict[str, float]:
        """Return the figures of the network and, at the trial's end, of its deployments; none of a test split."""
        measured = (*figures_of(self.trial, self.records), *headline(self.trial, self.records)) if self.at_end else ()
        found = {**self.record.figures, **{name: each for name, each, _ in measured}}
        return {name: each for name, each in found.items() if not _is_of_test(name)}

    def quantity(self, name: str) -> float | None:
        """Return a quantity of the network; None if it was not measured.

        Args:
            name: `parameters` or `macs` that remain, `training_macs` from the initialisation, `bytes`, `latency` or
                `DEPLOYED` of the network at the trial's end
        """
        record = self.record
        if name == "parameters":
            return float(record.remaining_parameters)
        if name == "macs":
            return record.macs_remaining if record.macs else None
        if name == "training_macs":
            spent = training_macs_until(self.plan, self.records, self.trial, record.key)
            return None if spent is None else float(spent)
        if not self.at_end:
            return None
        if name == DEPLOYED:
            return first.figure("val") if (first := self._first) is not None and first.after else None
        return {figure: value for figure, value, _ in headline(self.trial, self.records)}.get(MEASURED[name])

    def machine(self) -> str:
        """Return the hardware of the trial's first measurement; empty if there is none."""
        return "" if (first := self._first) is None else hardware_of(first)

    @property
    def at_end(self) -> bool:
        """Whether the network is the last one of its trial."""
        return self.record.key == self.trial.stages[-1]

    @property
    def _first(self) -> StageRecord | None:
        """Record of the trial's first measurement."""
        return self.records.get(self.trial.measured[0]) if self.trial.measured else None


def _is_of_test(figure: str) -> bool:
    """Whether a figure comes from a test split, as in `test/loss`, `test_NAME/loss` or `deploy/onnx_int8/test/loss`."""
    return any(part.startswith("test") for part in figure.split("/")[:-1])


def place_of_measurement(trial: TrialSpec) -> Any:
    """Return the first format and batch size of a trial's deployments, and their threads; None without any."""
    deploy = trial.config.get("deploy") or {}
    if not trial.measured or not deploy.get("formats"):
        return None
    return deploy["formats"][0], deploy["batch_sizes"][0], deploy.get("threads")
