"""The catalogue of allocations: how a total is divided over tensors. The code is in `pruning/selection/allocation.py`.

An allocation is a function (shapes, sizes, density, **options) -> the density of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, named
from pruning.catalogue.value_rules import Rule, is_number


@dataclass(frozen=True)
class Allocation(Row):
    """An allocation.

    Args:
        by_itself: each tensor is counted by itself, so that there is no total to divide.
        ranking: the score whose global ranking makes the counts.
        by_row: the allocation has a meaning where rows are ranked by themselves.
    """

    FAMILY: ClassVar[str] = "allocation"

    by_itself: bool = False
    ranking: str = ""
    by_row: bool = True


_POWER = Option("power", float, 1.0, "Of the ratio; 0 is uniform.", (Rule(is_number, "be a number"),))

ALLOCATIONS: Mapping[str, Allocation] = named(
    (
        Allocation("each", "", "each tensor by itself, all to the same sparsity", by_itself=True),
        Allocation(
            "uniform",
            "pruning.selection.allocation:uniform",
            "each tensor by itself; the total is shared evenly, to an exact total",
        ),
        Allocation(
            "uniform_plus",
            "pruning.selection.allocation:uniform_plus",
            "each tensor by itself; a first convolution is dense, the last tensor keeps at least 0.2, the rest share",
            paper="Lee et al. 2021, arXiv 2010.07611",
        ),
        Allocation(
            "er",
            "pruning.selection.allocation:er",
            "each tensor by itself; the total is shared by numbers of inputs and outputs",
            (_POWER,),
            "Mocanu et al. 2018, arXiv 1707.04780",
        ),
        Allocation(
            "erk",
            "pruning.selection.allocation:erk",
            "each tensor by itself; the total is shared by shapes",
            (_POWER,),
            "Evci et al. 2020, arXiv 1911.11134",
        ),
        Allocation(
            "lamp",
            "",
            "each tensor by itself; as many of each tensor as LAMP's scores of the weights would keep",
            paper="Lee et al. 2021, arXiv 2010.07611",
            ranking="lamp",
            by_row=False,
        ),
        Allocation(
            "given",
            "",
            "each tensor by itself, to the density that it is given: '+scope.densities={conv*: 0.5, fc*: 0.1}' with "
            "schedule.sparsity=null",
            by_itself=True,
        ),
    )
)
"""Name -> allocation; those without code are counted in another way, as their fields say."""
