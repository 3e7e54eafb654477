"""The catalogue of repairs, which change survivors, biases or statistics. The code is in `pruning/repair`.

A repair is a function (given: ScoringInput, kept, **options) -> {name of a parameter or buffer: its new value}; `kept`
is name -> tensor, nonzero where an entry is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, above, named


@dataclass(frozen=True)
class RepairRow(Row):
    """A repair.

    Args:
        spans_tensors: whether the repair works with dependency groups.
    """

    FAMILY: ClassVar[str] = "repair"

    spans_tensors: bool = False


_POSITIVE = above(0).or_null()
_OF_MATRIX = Option(
    "damping",
    float | None,
    None,
    "Added to the diagonal of the Fisher matrix; null: the damping of the score obs if obs ranks, else 1e-5.",
    (_POSITIVE,),
)

REPAIRS: Mapping[str, RepairRow] = named(
    (
        RepairRow("none", "", "survivors keep their values", spans_tensors=True),
        RepairRow(
            "obs",
            "pruning.repair.corrections:obs",
            "survivors compensate for each pruned entry separately",
            (_OF_MATRIX,),
            "Singh & Alistarh 2020, arXiv 2004.14340",
            unlisted=("block", "matrix"),
            version=2,
        ),
        RepairRow(
            "obs_joint",
            "pruning.repair.corrections:obs_joint",
            "survivors compensate for all pruned entries together",
            (_OF_MATRIX,),
            "Hassibi & Stork 1993",
            unlisted=("block", "matrix"),
            version=2,
        ),
        RepairRow(
            "least_squares",
            "pruning.repair.corrections:least_squares",
            "each layer is refit to its outputs before the pruning",
            (
                Option(
                    "damping",
                    float | None,
                    None,
                    "Added to the diagonal of X^T X, as a fraction of its mean; null: 0.01.",
                    (_POSITIVE,),
                ),
            ),
        ),
        RepairRow(
            "absorb_bias",
            "pruning.repair.corrections:absorb_bias",
            "constant outputs of dead channels move into the next layers' biases",
        ),
        RepairRow(
            "bn_stats",
            "pruning.repair.corrections:bn_stats",
            "running statistics of BatchNorm are recomputed",
            spans_tensors=True,
        ),
    )
)
"""Name -> repair; "none" has no code."""
