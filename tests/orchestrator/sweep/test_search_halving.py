"""Rungs of a race: which candidates go on, what a tie and an interval change, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from searched_plans import grid, noisy, records_of, run_search, titles

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching

METHODS = tuple(f"method_{index}" for index in range(9))


def by_index(method: str, sparsity: float, seed: int) -> float:
    """Lose a point for each index; equal at all seeds."""
    return int(method[-1]) / 100


def raced(policy: Halving, plan: Plan, records: dict[str, StageRecord]) -> tuple[list[str], list[str], int]:
    """Return the titles of the looks, their conclusions, and the number of rounds that were run."""
    decisions, ran = run_search(policy, plan, records)
    last = decisions[-1]
    return titles(last), [look.concluded for look in last.looks], sum(each.kind == "round" for each in ran.values())


def test_a_third_of_the_candidates_goes_on_with_three_times_the_seeds_until_one_is_left() -> None:
    plan = grid(METHODS, (0.5,), seeds=9)
    looked, concluded, rounds = raced(Halving(), plan, records_of(plan, by_index))

    assert looked == ["rung 1 of 3: 9 candidates, 1 seed", "rung 2 of 3: 3 candidates, 3 seeds"]
    assert concluded == ["3 of 9 candidates go on; best: method_0 at 50.00%", "best: method_0 at 50.00%"]
    assert rounds == 9 + 3 * 2


def test_the_answer_names_its_seeds_and_the_settings_that_run_the_others() -> None:
    plan = grid(METHODS[:3], (0.5, 0.9), seeds=9)
    trials = tuple(replace(each, overrides=("schedule=one_shot", *each.overrides)) for each in plan.trials)
    decisions, _ = run_search(Halving(), Plan(plan.stages, trials), records_of(plan, by_index))
    stopped, answer = decisions[-1].stopped, decisions[-1].answers[1]

    assert ", 1 of 9 seeds; not told from it: method_1 at 90.00%; method_2 at 90.00%; to run its other 8 " in answer
    assert answer.endswith("8 seeds, pass search=none method=method_0 schedule.sparsity=0.9")
    assert stopped["method_0 sparsity=0.9 seed=1"] == "the best at 90.00% after 1 seed, when no other was left to rank"
    whole, _ = run_search(Halving(first=9), plan, records_of(plan, by_index))
    assert ", 9 seeds; not told" in whole[-1].answers[1]
    assert "search=none" not in whole[-1].answers[1], "the last rung has run all seeds"


def test_the_only_candidate_of_a_sparsity_needs_no_second_rung() -> None:
    plan = grid(METHODS[:2], (0.5, 0.9), seeds=9)
    kept = [each for each in plan.trials if not each.name.startswith("method_1 sparsity=0.9")]
    looked, concluded, _ = raced(Halving(), Plan(plan.stages, tuple(kept)), records_of(plan, by_index))

    assert looked == ["rung 1 of 3 at 50.00%: 2 candidates, 1 seed", "rung 1 of 3 at 90.00%: 1 candidate, 1 seed"]
    assert concluded[1] == "best: method_0 at 90.00%"


def test_candidates_race_at_each_sparsity_of_their_own() -> None:
    plan = grid(METHODS[:3], (0.5, 0.9), seeds=3)

    def turned(method: str, sparsity: float, seed: int) -> float:
        return by_index(method, sparsity, seed) * (1 if sparsity < 0.7 else -1)

    decisions, _ = run_search(Halving(), plan, records_of(plan, turned))

    assert [answer.partition(",")[0] for answer in decisions[-1].answers] == [
        "best at 50.00%: method_0 at 50.00%",
        "best at 90.00%: method_2 at 90.00%",
    ]
    assert decisions[-1].stopped["method_2 sparsity=0.5 seed=2"] == "ruled out after 1 seed at 50.00%"
    assert len(decisions[-1].networks) == 2, "one seed of both winners is run"


def test_tied_candidates_stay_together() -> None:
    plan = grid(METHODS, (0.5,), seeds=9)
    _, concluded, _ = raced(Halving(), plan, records_of(plan, lambda method, *_: 0.01 * (method > "method_4")))

    assert concluded[0].startswith("5 of 9 candidates go on")


def test_an_interval_rules_out_only_what_is_shown_to_be_worse() -> None:
    plan = grid(METHODS[:3], (0.5,), seeds=6)

    def close(method: str, sparsity: float, seed: int) -> float:
        return (0.05 if method == "method_2" else 0.0) + noisy((method, seed))

    by_rank, certain = Halving(first=3), Halving(first=3, confidence=0.95)
    _, ranked, _ = raced(by_rank, plan, records_of(plan, close))
    looked, concluded, _ = raced(certain, plan, records_of(plan, close))
    decisions, _ = run_search(certain, plan, records_of(plan, close))

    assert ranked == [ranked[0]]
    assert ranked[0].startswith("best: ")
    assert concluded[0].startswith("2 of 3")
    assert looked[-1] == "rung 2 of 2: 2 candidates, 6 seeds"
    assert "; not told from it: method_" in decisions[-1].answers[0]


def test_rungs_of_rounds_run_trials_only_as_far_as_they_stand() -> None:
    plan = grid(METHODS, (0.9,), seeds=2, rounds=9)
    looked, _, rounds = raced(Halving("rounds"), plan, records_of(plan, by_index))

    assert looked == [
        "rung 1 of 3: 9 candidates, 1 round",
        "rung 2 of 3: 3 candidates, 3 rounds",
        "rung 3 of 3: 1 candidate, 9 rounds",
    ]
    assert rounds == 2 * (9 + 3 * 2 + 6)


def test_a_candidate_that_fails_is_the_last() -> None:
    plan = grid(METHODS[:3], (0.5,), seeds=3)
    failing = [trial.stages[1] for trial in plan.trials if trial.name.startswith("method_0")]
    decisions, _ = run_search(Halving(), plan, records_of(plan, by_index), failed=failing)

    assert decisions[-1].answers[0].startswith("best: method_1 at 50.00%, -1.00 points against dense")
    assert "method_0 sparsity=0.5 seed=1" in decisions[-1].stopped


@pytest.mark.parametrize("policy", [Halving(), Halving("rounds", factor=2), Halving(first=2, confidence=0.9)])
def test_the_bounds_hold(policy: Halving) -> None:
    plan = grid(METHODS, (0.5, 0.9), seeds=6, rounds=4)
    space = SearchSpace(plan)
    least, most = ({key for cell in cells for key in space.stages(cell)} for cells in policy.bounds(space))
    for loss in (by_index, lambda *_: 0.0, lambda *place: noisy(place)):
        _, ran = run_search(policy, plan, records_of(plan, loss))
        assert len(least) <= len(ran) <= len(most)


@pytest.mark.parametrize(
    ("policy", "plan", "text"),
    [
        (Halving(), grid(("l1_unstructured",), (0.5, 0.9)), "no sparsity has two; add an axis, as in method="),
        (Halving(first=9), grid(METHODS[:2]), "search.first (=9) is beyond the 8 seeds of method_0"),
        (Halving("rounds"), grid(METHODS[:2]), "is beyond the 1 round of method_0 at 30.00%; pass search.first=1 and"),
        (Halving(confidence=0.9), grid(METHODS[:2]), "search.confidence (=0.9) needs 2 or more seeds at the first"),
    ],
)
def test_what_cannot_be_raced_is_refused(policy: Halving, plan: Plan, text: str) -> None:
    told = [*policy.refusals(SearchSpace(plan))]

    assert told
    assert text in told[0]


def test_candidates_without_the_same_seeds_are_refused() -> None:
    plan = grid(METHODS[:2], (0.5, 0.6), seeds=8)
    last, first = Plan(plan.stages, plan.trials[:-1]), Plan(plan.stages, plan.trials[1:])

    for policy in (Halving(), Matching()):
        for lacking, name in ((last, "7 for method_1 at 60.00%"), (first, "0 for method_0 at 50.00%")):
            told = [*policy.refusals(SearchSpace(lacking))]
            assert told == [
                f"`seed` has no value {name}, and a search pairs candidates by seed; give all candidates the same "
                "seeds, as in seed=range(8)."
            ]
