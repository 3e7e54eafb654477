"""The catalogue of method classes, each with its own `compute_mask`. The code is in `pruning/methods`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from pruning.catalogue.rows import REQUIRED, BaselineRole, Option, Row, Rule, is_int, is_number, named

NORMS = ("inf", "-inf", "fro", "nuc")
"""Orders of a norm that are written as words."""


@dataclass(frozen=True)
class MethodClass(Row):
    """A class derived from `BasePruningMethod`.

    Args:
        channels: the class prunes whole channels along `dim`.
        in_sweep: sweeps offer the class by its name.
        baseline: what comparisons use the class as.
    """

    FAMILY: ClassVar[str] = "method"

    channels: bool = False
    in_sweep: bool = True
    baseline: BaselineRole = ""


_DIM = Option(
    "dim",
    int,
    -1,
    "The dimension that counts channels: 0 for outputs, 1 for inputs.",
    (Rule(is_int, "be an integer: the dimension that counts channels"),),
)
_NORM = Rule(
    lambda value: is_number(value) or value in NORMS,
    f"be a number or one of {', '.join(NORMS)}: the order of the norm; pass 2",
)

METHODS: Mapping[str, MethodClass] = named(
    (
        MethodClass("identity", "pruning.methods.built_in:Identity", "nothing is pruned"),
        MethodClass(
            "random_unstructured",
            "pruning.methods.built_in:RandomUnstructured",
            "random entries",
            baseline="random",
        ),
        MethodClass(
            "l1_unstructured",
            "pruning.methods.built_in:L1Unstructured",
            "entries with the smallest |w|",
            baseline="magnitude",
        ),
        MethodClass(
            "random_structured",
            "pruning.methods.built_in:RandomStructured",
            "random channels along `dim`",
            (_DIM,),
            in_sweeps={"dim": 0},
            channels=True,
            version=3,
            baseline="random",
        ),
        MethodClass(
            "ln_structured",
            "pruning.methods.built_in:LnStructured",
            "channels along `dim` with the smallest L_n norm; `n` is a number, inf, -inf, fro or nuc",
            (_DIM, Option("n", Any, REQUIRED, "The order of the norm.", (_NORM,))),
            in_sweeps={"dim": 0, "n": 2},
            channels=True,
            version=3,
            baseline="magnitude",
        ),
        MethodClass(
            "custom_from_mask", "pruning.methods.built_in:CustomFromMask", "a mask of your own", in_sweep=False
        ),
    )
)
"""Name -> class."""
