"""Quantities that a search can make small, and Student's t intervals of many candidates at once. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from orchestrator.compare.deployment_points import figures_of, hardware_of, headline
from orchestrator.compare.statistics import LEAST_SPREAD, t_quantile
from orchestrator.compare.trial_rows import training_macs_until
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MEASURED = {"bytes": "deploy/bytes", "latency": "deploy/latency_ms", "token_latency": "deploy/token_ms"}
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
            name: `parameters` or `macs` that remain, `active_parameters` that a token uses, `training_macs` from the
                initialisation, `bytes`, `latency`, `token_latency` or `DEPLOYED` of the network at the trial's end
        """
        record = self.record
        if name == "parameters":
            return float(record.remaining_parameters)
        if name == "active_parameters":
            return float(record.typed.active_parameters or record.remaining_parameters)
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
        found = (self.records.get(key) for key in self.trial.measured[:1])
        return next((each for each in found if each is not None and KINDS[each.kind].times), None)


def _is_of_test(figure: str) -> bool:
    """Whether a figure comes from a test split, as in `test/loss`, `test_NAME/loss` or `deploy/onnx_int8/test/loss`."""
    return any(part.startswith("test") for part in figure.split("/")[:-1])


def place_of_measurement(trial: TrialSpec) -> Any:
    """Return the first format and batch size of a trial's deployments, and their threads; None without any."""
    deploy = trial.config.get("deploy") or {}
    if not trial.measured or not deploy.get("formats"):
        return None
    return deploy["formats"][0], deploy["batch_sizes"][0], deploy.get("threads")


Rows = Sequence[Sequence[float]]
"""Values of each candidate by seed; all have equally many."""


def lower_ends(rows: Rows, level: float) -> list[float]:
    """Return the lower end of each row's interval; the mean of a row with one value."""
    low, _ = _ends(_array(rows), level)
    return [float(each) for each in low]


def are_worse(rows: Rows, best: Sequence[float], level: float) -> list[bool]:
    """Return which rows an interval of their differences from `best` shows to be smaller, paired by seed.

    A difference without spread shows nothing. A row that is not finite is smaller than a finite `best`.
    """
    import numpy as np

    given, limit = _array(rows), np.asarray(best, dtype=np.float64)
    if not np.isfinite(limit).all():
        return [False] * len(given)
    finite = np.logical_and.reduce(np.isfinite(given), axis=1)
    low, high = _ends(np.where(finite[:, np.newaxis], given - limit, 0.0), level)
    shown = ~finite | ((high < 0) & (high - low > LEAST_SPREAD))
    return [bool(each) for each in shown]


def _array(rows: Rows) -> NDArray[np.float64]:
    import numpy as np

    return np.array(rows, dtype=np.float64)


def _ends(given: NDArray[np.float64], level: float) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the ends of the interval of each row's mean, mean -+ t(level, n - 1) std / sqrt(n)."""
    n = given.shape[1]
    mean = _sum(given) / n
    if n == 1:
        return mean, mean
    squares = _sum((given - mean.reshape(-1, 1)) ** 2)
    half = t_quantile(level, n - 1) / math.sqrt(n) * (squares / (n - 1)) ** 0.5
    return mean - half, mean + half


def _sum(given: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sum of each row, added from the left, so that every machine rounds in the same way."""
    total = given[:, 0].copy()
    for place in range(1, given.shape[1]):
        total += given[:, place]
    return total
