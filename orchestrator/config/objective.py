"""The one number that a search plugin is told of a trial."""

from __future__ import annotations

import math
from collections.abc import Sequence

from orchestrator.core.records import StageRecord

MATCHING = "matching_sparsity"
OBJECTIVES = ("val/accuracy", "val/loss", MATCHING)
"""Never of the test split: a search selects, and what selects must not be what is reported."""


def objective(name: str, records: Sequence[StageRecord]) -> float:
    """Return `name` of a trial, given the records of its dense stage and of its rounds.

    `val/accuracy` and `val/loss` are those of the last round. `matching_sparsity` is the largest sparsity of a round
    whose validation accuracy is at least that of the dense network, 0 where no round's is.
    """
    dense, *rounds = records
    if name != MATCHING:
        return float(records[-1].after.get(name, math.nan))
    floor = dense.after["val/accuracy"]
    return max((record.sparsity for record in rounds if record.after["val/accuracy"] >= floor), default=0.0)
