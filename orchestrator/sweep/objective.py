"""Objectives of a trial for a search plugin, and the checks of names and margins against the measured metrics."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.config.schema import MATCHING, SIZES
from orchestrator.core.metrics import Metric, margin_fault
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan


def objective(name: str | None, records: Sequence[StageRecord], measured: Mapping[str, float] | None = None) -> float:
    """Return the objective `name` of a trial; NaN if unknown.

    Metrics such as `val/loss`, and sizes such as `parameters/remaining`, are figures of the last round. None stands for
    the primary metric on the validation split. `matching_sparsity` is the largest sparsity of a round whose primary
    metric on that split is no worse than the dense network's; 0 if there is no such round.

    Args:
        name: name of the objective
        records: records of the trial's dense stage and of its rounds
        measured: figures of its deployed last network, such as `deploy/latency_ms`
    """
    dense, *rounds = records
    metric, floor = dense.primary, dense.figure("val")
    if name == MATCHING:
        return max((each.sparsity for each in rounds if metric.gain(each.figure("val"), floor) >= 0), default=0.0)
    known = {**records[-1].figures, **(measured or {})}
    return known.get(name or f"val/{metric.name}", math.nan)


def invalid_margin(plan: Plan, metric: Metric | None) -> Iterator[str]:
    """Yield a sentence if the margin of the sweep is not one of its primary metric."""
    margin = (plan.trials[0].config.get("compare") or {}).get("margin")
    if metric is not None and margin is not None and (fault := margin_fault(metric, float(margin))):
        yield f"`compare.margin` (={margin}) {fault}"


def unmeasured(names: Collection[str | None], figures: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each objective that is not among the `figures` of a task on the validation split."""
    for name in names:
        if name is None or name in (MATCHING, *SIZES) or name.startswith("deploy/"):
            continue
        if name not in (f"val/{figure}" for figure in figures):
            yield (
                f"`objective` (={name}) must be one of "
                f"{', '.join(f'val/{figure}' for figure in figures)}, {MATCHING}; pass null for the primary metric."
            )
