"""The one number that a search plugin is told of a trial."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

from orchestrator.config.schema import MATCHING
from orchestrator.core.records import StageRecord


def objective(name: str | None, records: Sequence[StageRecord]) -> float:
    """Return `name` of a trial, given the records of its dense stage and of its rounds.

    `val/loss`, `val/rmse` and the like are those of the last round, None the primary metric on the validation split.
    `matching_sparsity` is the largest sparsity of a round whose primary metric there is no worse than the dense
    network's, 0 where no round's is.
    """
    dense, *rounds = records
    metric, floor = dense.primary, dense.figure("val")
    if name != MATCHING:
        return records[-1].after.get(name or f"val/{metric.name}", math.nan)
    return max((each.sparsity for each in rounds if metric.gain(each.figure("val"), floor) >= 0), default=0.0)


def unmeasured(names: Collection[str | None], figures: Collection[str]) -> Iterator[str]:
    """Yield a sentence for each objective that is none of the `figures` that a task measures on validation."""
    for name in names:
        if name not in (None, MATCHING, *(f"val/{figure}" for figure in figures)):
            yield (
                f"`objective` (={name}) must be one of {', '.join(f'val/{figure}' for figure in figures)}, which are "
                f"measured, or {MATCHING}; pass null for the primary metric."
            )
