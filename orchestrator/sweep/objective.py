"""What a search plugin is told of a trial: a number, or several."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

from orchestrator.config.schema import MATCHING, SIZES
from orchestrator.core.records import StageRecord


def objective(name: str | None, records: Sequence[StageRecord], measured: Mapping[str, float] | None = None) -> float:
    """Return `name` of a trial, NaN where it is not known.

    `val/loss`, `val/rmse` and the like are those of the last round, as `parameters/remaining` and other sizes; None the
    primary metric on the validation split. `matching_sparsity` is the largest sparsity of a round whose primary metric
    there is no worse than the dense network's, 0 where no round's is.

    Args:
        records: of the trial's dense stage and of its rounds
        measured: `deploy/latency_ms` and the like of its last network
    """
    dense, *rounds = records
    metric, floor = dense.primary, dense.figure("val")
    if name == MATCHING:
        return max((each.sparsity for each in rounds if metric.gain(each.figure("val"), floor) >= 0), default=0.0)
    known = {**records[-1].figures, **(measured or {})}
    return known.get(name or f"val/{metric.name}", math.nan)


def unmeasured(names: Collection[str | None], figures: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each objective that is none of the `figures` that a task measures on validation."""
    for name in names:
        if name is None or name in (MATCHING, *SIZES) or name.startswith("deploy/"):
            continue
        if name not in (f"val/{figure}" for figure in figures):
            yield (
                f"`objective` (={name}) must be one of {', '.join(f'val/{figure}' for figure in figures)}, which are "
                f"measured, or {MATCHING}; pass null for the primary metric."
            )
