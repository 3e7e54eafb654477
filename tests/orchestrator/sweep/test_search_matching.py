"""The largest sparsity that matches dense: the path of the search, its refusals, and its error rates by simulation."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray
from searched_plans import crossing, grid, noisy, records_of, run_search, titles

from orchestrator.compare.statistics import estimate, matches
from orchestrator.core.metrics import Metric
from orchestrator.core.specs import Plan
from orchestrator.sweep.search.candidates import Candidate, Cell, SearchSpace
from orchestrator.sweep.search.matching import Matching, would_match
from orchestrator.sweep.search.policy import Answer, Ask, Figures

PLAN = grid()
ACCURACY = Metric("accuracy", "%", "higher", margin=1.0, format=".2f")


def answer_of(plan: Plan, at: float, **given: object) -> tuple[list[str], tuple[str, ...]]:
    decisions, _ = run_search(Matching(), plan, records_of(plan, crossing(at)), **given)  # type: ignore[arg-type]
    return titles(decisions[-1]), decisions[-1].answers


def test_bisection_with_a_few_seeds_then_tests_upwards_with_the_others() -> None:
    looked, answers = answer_of(PLAN, 0.63)

    assert looked == [
        "explore l1_unstructured at 60.00%",
        "explore l1_unstructured at 40.00%",
        "explore l1_unstructured at 50.00%",
        "confirm l1_unstructured at 40.00%",
        "confirm l1_unstructured at 50.00%",
        "confirm l1_unstructured at 60.00%",
        "confirm l1_unstructured at 70.00%",
    ]
    assert answers == (
        "l1_unstructured: 60.00% matches dense: a loss of 1.00 points of accuracy or more is ruled out on validation "
        "by 5 seeds that explored nothing",
    )


def test_a_first_look_is_judged_again_by_the_spread_of_all_looks() -> None:
    def wide(method: str, sparsity: float, seed: int) -> float:
        """The first look has a deviation of 0.3 points, the others of less than 0.1."""
        return 0.003 * (seed - 1) if sparsity == 0.6 and seed < 3 else crossing(0.85)(method, sparsity, seed)

    decisions, _ = run_search(Matching(), PLAN, records_of(PLAN, wide))
    looks = decisions[-1].looks

    assert titles(decisions[-1])[:4] == [
        *(f"explore l1_unstructured at {percent}" for percent in ("60.00%", "40.00%", "50.00%")),
        "confirm l1_unstructured at 50.00%",
    ]
    assert looks[0].concluded.endswith("; on to denser networks")
    assert looks[2].concluded.endswith("; by the spread of all looks l1_unstructured at 60.00% is good enough")


def test_the_seeds_that_confirm_have_not_explored() -> None:
    decisions, _ = run_search(Matching(), PLAN, records_of(PLAN, crossing(0.63)))
    seed = {key: spec.fields["seed"] for key, spec in PLAN.stages.items()}
    explored = {seed[key] for look in decisions[-1].looks if not look.confirms for key in look.asked}
    confirmed = {seed[key] for look in decisions[-1].looks if look.confirms for key in look.asked}

    assert (explored, confirmed) == ({0, 1, 2}, {3, 4, 5, 6, 7})


@pytest.mark.parametrize(
    ("at", "text"),
    [
        (0.1, "no sparsity is shown to match dense; the confirmation ended at l1_unstructured at 30.00%"),
        (3.0, "90.00% matches dense: .*; no sparser network was swept"),
    ],
)
def test_an_answer_at_an_end_of_the_axis_says_so(at: float, text: str) -> None:
    _, (answer,) = answer_of(PLAN, at)
    assert re.search(text, answer)


def test_the_rounds_on_the_way_to_one_sparsity_are_its_axis() -> None:
    plan = grid(sparsities=(0.99,), rounds=5)
    records = records_of(plan, crossing(0.9))
    decisions, ran = run_search(Matching(), plan, records)

    assert titles(decisions[-1])[0] == "explore l1_unstructured at 93.69%", "after the third of five rounds"
    assert "l1_unstructured: 84.15% matches dense" in decisions[-1].answers[0]
    assert not [key for key in ran if ran[key].round == 5], "a trial is run only as far as it is asked for"


def test_a_second_try_has_seeds_of_its_own_and_half_of_the_error() -> None:
    def late(method: str, sparsity: float, seed: int) -> float:
        """Explorers see no loss; of the others all lose at 80% and more."""
        return noisy((sparsity, seed)) + (0.03 if seed > 2 and sparsity > 0.75 else 0.0)

    plan = grid(seeds=9)
    one, _ = run_search(Matching(), plan, records_of(plan, late))
    two, _ = run_search(Matching(tries=2), plan, records_of(plan, late))
    seeds = [{plan.stages[key].fields["seed"] for key in look.asked} for look in two[-1].looks if look.confirms]

    assert "no sparsity is shown to match dense" in one[-1].answers[0]
    assert "70.00% matches dense" in two[-1].answers[0]
    assert seeds[0] == {3, 5, 7}
    assert all(each == {4, 6, 8} for each in seeds[1:])
    assert Matching(tries=2).level == pytest.approx(0.975)


def test_seeds_that_an_earlier_search_has_seen_do_not_confirm() -> None:
    records = records_of(PLAN, crossing(0.63))
    before, _ = run_search(Matching(), PLAN, records)
    wide = grid(seeds=12)
    refused = [*Matching().refusals(SearchSpace(PLAN, before[-1].seen))]
    again, _ = run_search(Matching(), wide, records_of(wide, crossing(0.63)), seen=before[-1].seen)
    confirmed = {wide.stages[key].fields["seed"] for look in again[-1].looks if look.confirms for key in look.asked}

    assert len(refused) == 1
    assert "has 0 values for l1_unstructured that could confirm" in refused[0]
    assert "seed=range(13)" in refused[0]
    assert confirmed == {8, 9, 10, 11}


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (grid(sparsities=(0.5,)), "has only one; pass an axis, as in schedule.sparsity=0.5,0.6"),
        (
            grid(seeds=4),
            "`seed` has 4 values for l1_unstructured, too few to explore and to confirm.*seed=range\\(8\\)",
        ),
    ],
)
def test_what_cannot_be_searched_is_refused(plan: Plan, text: str) -> None:
    (told,) = Matching().refusals(SearchSpace(plan))

    assert re.search(text, told)


@pytest.mark.parametrize(
    ("compare", "task", "key"), [(0.0, 0.1, "compare"), (None, 0.0, "task"), (0.1, 0.0, ""), (None, 0.1, "")]
)
def test_a_margin_of_zero_is_refused(compare: float | None, task: float, key: str) -> None:
    changes = {"compare": {"margin": compare}, "task": {"margin": task}}
    plan = Plan(PLAN.stages, tuple(replace(each, config={**each.config, **changes}) for each in PLAN.trials))
    told = [*Matching().refusals(SearchSpace(plan))]

    assert [each.partition(" (=0)")[0] for each in told] == ([f"`{key}.margin`"] if key else [])


def test_an_axis_without_an_order_is_refused() -> None:
    plan = grid(sparsities=(0.5, 0.6))
    stages = {
        key: spec if spec.kind == "dense" else type(spec)(spec.kind, {**spec.fields, "target": None}, spec.inputs)
        for key, spec in plan.stages.items()
    }
    (told,) = Matching().refusals(SearchSpace(Plan(stages, plan.trials)))

    assert told.startswith("search=matching needs an axis with an order, and l1_unstructured has networks without")


def test_the_bounds_hold_for_every_crossing() -> None:
    fewest, most = (len({*cells}) for cells in Matching().bounds(SearchSpace(PLAN)))
    counts = []
    for at in (0.1, 0.35, 0.45, 0.55, 0.65, 0.75, 0.85, 3.0):
        _, ran = run_search(Matching(), PLAN, records_of(PLAN, crossing(at)))
        counts.append(sum(record.kind == "round" for record in ran.values()))

    assert (fewest, most) == (14, 44)
    assert min(counts) >= fewest
    assert max(counts) <= most


def test_the_prediction_of_a_confirmation_by_hand() -> None:
    # gains 0 and 0.2: mean 0.1, deviation 0.1 sqrt(2); 6 seeds: t(0.975, 5) = 2.571; t(0.985, 1) = 21.205
    limit = 0.1 - 0.1 * 2**0.5 * (2.570582 / 6**0.5 + 21.204949 * (1 / 2 + 1 / 6) ** 0.5)

    assert would_match([[0.0, 0.2]], 6, -limit + 1e-4)
    assert not would_match([[0.0, 0.2]], 6, -limit - 1e-4)
    assert would_match([[0.0, 0.2], [5.0, 5.0]], 6, 0.0), "a second sparsity adds a degree of freedom"


def candidates(count: int, seeds: int) -> list[Candidate]:
    """Return candidates whose networks are named by index and seed."""
    return [
        Candidate(f"at {i}", "line", "data", i / 100, 1, {s: Cell(0, s, f"{i}.{s}", "") for s in range(seeds)})
        for i in range(count)
    ]


def claimed(policy: Matching, points: Sequence[Candidate], gains: NDArray[np.float64]) -> int:
    """Run the search of one line on gains by (seed, index); return the index of the claim, -1 for none."""
    strand = policy.strands(_Line(points))[0]
    step = next(strand)
    while not isinstance(step, Answer):
        if isinstance(step, Ask):
            places = {cell: (cell.seed, int(cell.network.partition(".")[0])) for cell in step.cells}
            step = strand.send({cell: Figures(ACCURACY, gains[at], 0.0) for cell, at in places.items()})
        else:
            step = next(strand)
    return int(step.networks[0].partition(".")[0]) if step.networks else -1


class _Line(SearchSpace):
    """Space with one line of given candidates."""

    def __init__(self, points: Sequence[Candidate]) -> None:
        self.seen = frozenset()
        self.lines = {"line": tuple(points)}  # type: ignore[misc]


def fixed(gains: NDArray[np.float64]) -> int:
    """Return the claim of the comparison's test of the whole line, from the least sparse point on."""
    found = [*matches((estimate([*column]) for column in gains.T), ACCURACY)]
    return found.index("no") - 1 if "no" in found else len(found) - 1


@pytest.mark.slow  # 10,000 searches
@pytest.mark.parametrize("tries", [pytest.param(1, marks=pytest.mark.many), 2])
def test_at_the_margin_no_more_than_a_fortieth_of_the_matches_are_false(tries: int) -> None:
    draw, points, policy = np.random.default_rng(0), candidates(15, 8), Matching(tries=tries)
    loss = 2.0 ** (np.arange(15.0) - 9)  # the margin of 1 is reached at the tenth sparsity
    false = 0
    for _ in range(10_000):
        dense = draw.normal(size=(8, 1))
        gains = 0.2 * (dense + draw.normal(size=(8, 15))) / 2**0.5 - loss
        false += claimed(policy, points, gains) >= 9

    assert false / 10_000 < 0.025 + 2 * (0.025 * 0.975 / 10_000) ** 0.5
    assert false > 50, "the sequence does reach the margin"


@pytest.mark.slow  # thousands of searches
@pytest.mark.parametrize(
    ("growth", "deviation", "seeds"),
    [
        pytest.param(*case, marks=() if case in ((1.3, 0.3, 8), (1.3, 1.0, 6)) else pytest.mark.many)
        for case in product((1.3, 1.15, 2.0), (0.1, 0.3, 0.5, 1.0), (6, 8))
    ],
)
def test_the_power_is_within_five_points_of_the_fixed_test(growth: float, deviation: float, seeds: int) -> None:
    draw, points, policy = np.random.default_rng(1), candidates(15, seeds), Matching()
    loss = growth ** (np.arange(15.0) - 9)
    found = []
    for _ in range(2000):
        dense = draw.normal(size=(seeds, 1))
        gains = deviation * (dense + draw.normal(size=(seeds, 15))) / 2**0.5 - loss
        found.append((claimed(policy, points, gains), fixed(gains[3:])))
    ours, theirs = np.array(found).T

    for index in range(9):
        power, whole = (ours >= index).mean(), (theirs >= index).mean()
        assert power > whole - 0.05 - 0.02, index  # two standard errors of the paired difference
