"""Catalogue of searches, which decide what a sweep runs. A row's code is a `Policy` of `orchestrator.sweep.search`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, named
from pruning.catalogue.value_rules import above, one_of, whole, within


class Search(Row):
    """Row of a search."""

    FAMILY: ClassVar[str] = "search"


BUDGET = (
    Option(
        "trials",
        int | None,
        None,
        "Maximum number of trials that the search asks for; null: no limit.",
        (whole(1, ", a trial").or_null(", or null"),),
    ),
    Option(
        "steps",
        int | None,
        None,
        "Optimizer steps of finished stages after which the search asks for nothing more; null: no limit.",
        (whole(1).or_null(", or null"),),
    ),
    Option(
        "seconds",
        float | None,
        None,
        "Seconds of finished stages, one after the other, after which the search asks for nothing more; null: no "
        "limit.",
        (above(0).or_null(", or null"),),
    ),
)
"""Options of every search: its budget."""
SEARCHES: Mapping[str, Search] = named(
    (
        Search("none", "", "No search: every trial runs."),
        Search(
            "matching",
            "orchestrator.sweep.search.matching:Matching",
            "The largest sparsity that matches dense, by line: bisection with a few seeds, then a test with others.",
            (
                Option("explore", int, 3, "Number of seeds that explore; all others confirm.", (whole(2),)),
                Option(
                    "tries",
                    int,
                    1,
                    "Maximum number of confirmations; each has seeds of its own and an equal part of the 2.5%.",
                    (whole(1),),
                ),
                *BUDGET,
            ),
        ),
        Search(
            "halving",
            "orchestrator.sweep.search.halving:Halving",
            "The best settings at each sparsity: rungs with more and more seeds or rounds for fewer and fewer of them.",
            (
                Option(
                    "rungs",
                    str,
                    "seeds",
                    "What grows from rung to rung: `seeds`, or `rounds` of every seed.",
                    (one_of("seeds", "rounds"),),
                ),
                Option("first", int, 1, "Number of seeds or rounds of the first rung.", (whole(1),)),
                Option(
                    "factor",
                    int,
                    3,
                    "Growth from rung to rung, and the divisor of the number of candidates.",
                    (whole(2),),
                ),
                Option(
                    "confidence",
                    float | None,
                    None,
                    "Level of an interval that must exclude a candidate before it is ruled out; null: by rank alone.",
                    (within("; pass 0.9").or_null(),),
                ),
                *BUDGET,
            ),
            paper="Jamieson and Talwalkar 2016, arXiv 1502.07943",
        ),
    )
)
"""Name -> search."""
