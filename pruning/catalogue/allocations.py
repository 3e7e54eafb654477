"""The catalogue of allocations, which divide a total over tensors. The code is in `pruning/selection/allocation.py`.

An allocation is a function (shapes, sizes, density, **options) -> density of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, Rule, is_number, named


@dataclass(frozen=True)
class AllocationRow(Row):
    """An allocation.

    Args:
        by_itself: each tensor has a count of its own, and there is no total to divide.
        ranking: the score whose global ranking decides the counts.
        by_row: whether the allocation works with scope.kind="row".
    """

    FAMILY: ClassVar[str] = "allocation"

    by_itself: bool = False
    ranking: str = ""
    by_row: bool = True


_POWER = Option("power", float, 1.0, "Exponent of the shape ratio; 0 is uniform.", (Rule(is_number, "be a number"),))

ALLOCATIONS: Mapping[str, AllocationRow] = named(
    (
        AllocationRow("each", "", "each tensor ranked separately, all to the same sparsity", by_itself=True),
        AllocationRow(
            "uniform",
            "pruning.selection.allocation:uniform",
            "each tensor ranked separately; all get the same density, and counts add up to the exact total",
        ),
        AllocationRow(
            "uniform_plus",
            "pruning.selection.allocation:uniform_plus",
            "each tensor ranked separately; a first convolution stays dense, the last tensor keeps at least 0.2, all "
            "others get the same density",
            paper="Lee et al. 2021, arXiv 2010.07611",
        ),
        AllocationRow(
            "er",
            "pruning.selection.allocation:er",
            "each tensor ranked separately; densities follow the numbers of inputs and outputs",
            (_POWER,),
            "Mocanu et al. 2018, arXiv 1707.04780",
        ),
        AllocationRow(
            "erk",
            "pruning.selection.allocation:erk",
            "each tensor ranked separately; densities follow the shapes",
            (_POWER,),
            "Evci et al. 2020, arXiv 1911.11134",
        ),
        AllocationRow(
            "lamp",
            "",
            "each tensor ranked separately; each keeps as many weights as a global ranking by LAMP's scores would",
            paper="Lee et al. 2021, arXiv 2010.07611",
            ranking="lamp",
            by_row=False,
        ),
        AllocationRow(
            "given",
            "",
            "each tensor ranked separately, to a density of your choice: '+scope.densities={conv*: 0.5, fc*: 0.1}' "
            "with schedule.sparsity=null",
            by_itself=True,
        ),
    )
)
"""Name -> allocation; the fields of a row without code decide its counts."""
