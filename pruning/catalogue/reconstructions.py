"""The catalogue of methods that prune layer by layer with calibration data. The code is in `pruning/reconstruction`.

A reconstruction is a function (problem: LayerProblem, **options) -> Solution.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, above, named, whole


@dataclass(frozen=True)
class Reconstruction(Row):
    """A method for one layer.

    Args:
        updates: the values of survivors change.
        by_row: each row loses equally many entries, up to one; otherwise the layer's total is exact.
        reads_data: the method reads statistics of the layer's inputs.
        chooses: the method chooses which entries go; otherwise it keeps the given masks.
        keeps_head: the paper leaves the head of a language model dense.
    """

    FAMILY: ClassVar[str] = "reconstruction"

    updates: bool = False
    by_row: bool = False
    reads_data: bool = True
    chooses: bool = True
    keeps_head: bool = False


_CALIBRATION = {"examples": 128, "batch_size": 8}
"""Calibration data in a sweep, as in the papers; batches of a size that language models fit in."""
_DAMPING = Option("damping", float, 0.01, "Added to the diagonal, as a fraction of its mean.", (above(0),))

RECONSTRUCTIONS: Mapping[str, Reconstruction] = named(
    (
        Reconstruction(
            "sparsegpt",
            "pruning.reconstruction.sparsegpt:sparsegpt",
            "columns from left to right; the columns to the right make up for pruned weights",
            (_DAMPING, Option("block", int, 128, "Columns of a block, whose entries rank together.", (whole(1),))),
            "Frantar & Alistarh 2023, arXiv 2301.00774",
            in_sweeps=_CALIBRATION,
            updates=True,
            keeps_head=True,
            version=2,
        ),
        Reconstruction(
            "alps",
            "pruning.reconstruction.layer_problem:alps",
            "weights and their sparse copy approach each other; then least squares",
            (
                _DAMPING,
                Option("rounds", int, 300, "Largest number of rounds.", (whole(1),)),
                Option("refits", int, 10, "Steps of conjugate gradients on the support.", (whole(0),)),
            ),
            "Meng et al. 2024, arXiv 2406.07831",
            in_sweeps=_CALIBRATION,
            updates=True,
            keeps_head=True,
            version=2,
        ),
        Reconstruction(
            "wanda",
            "pruning.reconstruction.layer_problem:wanda",
            "weights times the norms of their inputs, by row",
            paper="Sun et al. 2023, arXiv 2306.11695",
            by_row=True,
            keeps_head=True,
        ),
        Reconstruction(
            "least_squares",
            "pruning.reconstruction.layer_problem:least_squares",
            "survivors of given masks, refitted by row so that outputs change least",
            (_DAMPING,),
            updates=True,
            chooses=False,
        ),
        Reconstruction(
            "magnitude",
            "pruning.reconstruction.layer_problem:magnitude",
            "the smallest weights of each layer",
            reads_data=False,
        ),
    )
)
"""Name -> method."""
SOLVERS: Mapping[str, Reconstruction] = {
    name: row for name, row in RECONSTRUCTIONS.items() if row.updates and row.chooses
}
"""Methods that choose and update entries of one layer together. They rank only layer by layer, so they are no scores of
`pruning.scores`; choices name them as a score."""
