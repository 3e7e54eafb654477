"""Catalogue of searches, which decide what a sweep runs. A row's code is a `Policy` of `orchestrator.sweep.search`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Option, Row, Rule, above, at_least, named, one_of, whole, within


@dataclass(frozen=True)
class SearchRow(Row):
    """Row of a search.

    Args:
        draws_frontier: reports draw the quantities `against` which the search weighs the metric.
    """

    FAMILY: ClassVar[str] = "search"

    draws_frontier: bool = False


QUANTITIES = ("parameters", "active_parameters", "macs", "bytes", "latency", "token_latency", "training_macs")
"""Quantities of a network that a frontier makes small, or limits."""
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
RUNGS = (
    Option(
        "rungs",
        str,
        "seeds",
        "What grows from rung to rung: `seeds`, or for every seed `rounds` or the last `training`.",
        (one_of("seeds", "rounds", "training"),),
    ),
    Option(
        "first",
        int,
        1,
        "Number of seeds, rounds or epochs of the first rung; of steps if `steps` gives the length of the training.",
        (whole(1),),
    ),
)
"""Options of a search by rungs."""
SEARCHES: Mapping[str, SearchRow] = named(
    (
        SearchRow("none", "", "No search: every trial runs."),
        SearchRow(
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
        SearchRow(
            "halving",
            "orchestrator.sweep.search.halving:Halving",
            "The best settings at each sparsity: rungs with more seeds, rounds or training for fewer of them.",
            (
                *RUNGS,
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
        SearchRow(
            "frontier",
            "orchestrator.sweep.search.frontier:Frontier",
            "The networks that no other beats in validation figure and size at once: by rungs, dominated ones stop.",
            (
                Option(
                    "against",
                    list[str],
                    ["parameters"],
                    "What to make small besides the loss of the validation figure: `parameters` and `macs` that "
                    "remain, `active_parameters` that a token uses, `training_macs`, and `bytes`, `latency` and "
                    "`token_latency` (of one more token) of the network deployed in the first format at the first "
                    "batch size.",
                    (
                        Rule(
                            lambda given: bool(given) and set(given) <= {*QUANTITIES} and len({*given}) == len(given),
                            f"hold one or more of {', '.join(QUANTITIES)}, each once",
                        ),
                    ),
                ),
                Option(
                    "within",
                    float | None,
                    None,
                    "Largest mean loss against dense of a network in the answer, in the metric's own scale: 0.005 is "
                    "half a percentage point; null: any.",
                    (at_least(0, ", or null").or_null(""),),
                ),
                Option(
                    "limits",
                    dict[str, float],
                    {},
                    "Largest means in the answer, as in +search.limits.latency=5, in milliseconds; the names are those "
                    "of `against`.",
                    (
                        Rule(
                            lambda given: set(given) <= {*QUANTITIES} and all(value > 0 for value in given.values()),
                            f"hold numbers above 0, named by {', '.join(QUANTITIES)}",
                        ),
                    ),
                ),
                *RUNGS,
                Option("factor", int, 3, "Growth from rung to rung.", (whole(2),)),
                Option(
                    "confidence",
                    float | None,
                    None,
                    "Level of an interval that must show a loss before a candidate is ruled out; null: means decide.",
                    (within("; pass 0.9").or_null(),),
                ),
                *BUDGET,
            ),
            draws_frontier=True,
        ),
    )
)
"""Name -> search."""
