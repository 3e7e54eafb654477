"""The answer of a search beside the answer of the whole grid: equal, or different with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import pytest
from factories import sweep_info
from searched_plans import crossing, grid, noisy, records_of, run_search

from orchestrator.core.events import PastSearch
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.store.saved_sweep import SavedSweep
from orchestrator.sweep.beside_grid import beside_grid
from orchestrator.sweep.search.building import search_digest
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from orchestrator.sweep.search.policy import Policy

PLAN = grid(("method_0", "method_1", "method_2"), (0.5, 0.7, 0.9), seeds=9)
KINDS = {Matching: "matching", Halving: "halving", Frontier: "frontier"}


def lines(
    policy: Policy, records: Mapping[str, StageRecord], plan: Plan = PLAN, margin: float | None = None
) -> list[str]:
    decisions, ran = run_search(policy, plan, records)
    settings: dict[str, Any] = {"kind": KINDS[type(policy)], **asdict(policy)}  # type: ignore[call-overload]
    config = {"search": {**settings, "trials": None, "steps": None, "seconds": None}, "compare": {"margin": None}}
    info = replace(sweep_info(), config=config)
    sweep = SavedSweep(info, plan, ran, {}, decisions[-1], {search_digest(info.config): PastSearch((), ())})
    return [*beside_grid(sweep, records, margin=margin)]


@pytest.mark.parametrize("policy", [Matching(), Halving(), Frontier()])
def test_a_search_that_finds_the_grid_s_answer_says_so_and_what_it_took(policy: Policy) -> None:
    def loss(method: str, sparsity: float, seed: int) -> float:
        return 0.0025 * int(method[-1]) + crossing(0.75)(method, sparsity, seed)

    head, *found = lines(policy, records_of(PLAN, loss))

    assert head.startswith("The search beside the whole grid, by the same rule on validation, for ")
    assert int(head.rpartition("for ")[2].partition("%")[0]) < 100
    assert found[-1] == "  Both answers name the same candidates."
    assert sum(each.startswith("  search: ") for each in found) == sum(each.startswith("  grid:   ") for each in found)


def test_another_margin_holds_for_both_answers() -> None:
    records = records_of(PLAN, crossing(0.75))
    own, (head, *found) = lines(Matching(), records), lines(Matching(), records, margin=0.05)
    answers = [each for each in found if each.startswith(("  search: ", "  grid:   "))]

    assert all(": 70.00% matches dense: a loss of 1.00 points" in each for each in own if each.startswith("  search: "))
    assert head.startswith(
        "The search beside the whole grid, by the same rule on validation with a margin of 0.05, for"
    )
    assert len(answers) == 6
    assert all(": 90.00% matches dense: a loss of 5.00 points" in each for each in answers)
    assert lines(Halving(), records, margin=0.05)[1:] == lines(Halving(), records)[1:], "no margin in its rule"
    (told,) = lines(Matching(), records, margin=0.0)
    assert told.startswith("The search cannot be set beside the whole grid: `compare.margin` (=0) leaves nothing")


def test_a_candidate_that_the_first_seed_ruled_out_is_named_with_the_reason() -> None:
    def unlucky(method: str, sparsity: float, seed: int) -> float:
        return 0.01 * int(method[-1]) + (0.05 if (method, seed) == ("method_0", 0) else 0.0) + noisy((method, seed))

    plan = grid(("method_0", "method_1", "method_2"), (0.5,), seeds=9)
    found = lines(Halving(), records_of(plan, unlucky), plan)

    assert found[-2:] == [
        "  only in the grid's answer: method_0 at 50.00%: ruled out after 1 seed (the search saw 1 of 9 networks)",
        "  only in the search's answer: method_1 at 50.00%; the grid: rung 1 of 1: 3 candidates, 9 seeds: best: "
        "method_0 at 50.00%",
    ]


def test_a_grid_that_has_not_finished_is_not_compared() -> None:
    records = records_of(PLAN, crossing(0.75))
    _, ran = run_search(Halving(), PLAN, records)
    decisions, _ = run_search(Halving(), PLAN, records)
    config = {"search": {"kind": "halving", **asdict(Halving())}, "compare": {"margin": None}}
    info = replace(sweep_info(), config=config)
    sweep = SavedSweep(info, PLAN, ran, {}, decisions[-1], {search_digest(config): PastSearch((), ())})

    (told,) = beside_grid(sweep, ran)

    assert told.endswith(f"of {len(PLAN.stages)} stages have not finished; run the same command with search=none.")
    lost = PLAN.trials[-1].stages[-1]
    left = {key: record for key, record in records.items() if key != lost}
    (told,) = beside_grid(sweep, left)
    assert f" 1 of {len(PLAN.stages)} stages " in told
    assert len([*beside_grid(sweep, left, [lost])]) > 1, "a network that fails every time is not waited for"
    assert [*beside_grid(replace(sweep, search=None), records)] == []
    assert [*beside_grid(replace(sweep, searches={}), records)] == []
