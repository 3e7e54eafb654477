"""Decisions follow from committed records alone, whatever their order, and cost little."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled
from searched_plans import crossing, grid, records_of, run_search, settings

from orchestrator.config.schema import ConfigError
from orchestrator.core.events import Decision, PastSearch
from orchestrator.core.plain_data import read_as
from orchestrator.core.records import StageRecord
from orchestrator.store.retention import needed_weights
from orchestrator.sweep.search.building import planned_search, search_digest
from orchestrator.sweep.search.candidates import Cell, SearchSpace
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.matching import Matching
from orchestrator.sweep.search.policy import Answer, Ask, Budget, Conclude, Policy, Strand
from orchestrator.sweep.search.replay import Replay, decide

PLAN = grid(("l1_unstructured", "random_unstructured"))
RECORDS = records_of(PLAN, crossing(0.62))
POLICIES = [
    *(Matching(), Matching(tries=2), Halving(), Halving(first=2, confidence=0.9)),
    *(Frontier(["macs", "parameters"], within=0.02), Frontier(first=2, confidence=0.9)),
]


@sampled(3)
@pytest.mark.parametrize("policy", POLICIES)
def test_decisions_are_equal_in_any_order_and_after_any_kill(policy: Policy) -> None:
    plain, ran = run_search(policy, PLAN, RECORDS)
    for seed in range(4):
        found, again = run_search(policy, PLAN, RECORDS, shuffle=random.Random(seed), kills=seed % 2 == 0)
        assert [each.looks for each in found] == [each.looks for each in plain]
        assert found[-1] == plain[-1]
        assert again.keys() == ran.keys()


@pytest.mark.parametrize("policy", POLICIES)
def test_a_search_sees_nothing_that_it_did_not_ask_for(policy: Policy) -> None:
    decisions, ran = run_search(policy, PLAN, RECORDS)
    last = decide(policy, SearchSpace(PLAN), Budget(), RECORDS, ())
    others = {key: replace(record, after={**record.after, "test/accuracy": 0.0}) for key, record in ran.items()}

    assert len(ran) < len(RECORDS)
    assert (last.looks, last.answers) == (decisions[-1].looks, decisions[-1].answers)
    assert not last.stopped, "all trials have finished"
    assert decide(policy, SearchSpace(PLAN), Budget(), others, ()) == decisions[-1], "figures on test count for nothing"


def test_no_figure_of_a_test_split_reaches_a_policy() -> None:
    seen: list[str] = []
    reached: set[str] = set()

    class Nosy(Matching):
        def strands(self, space: SearchSpace) -> list[Strand]:
            def strand() -> Strand:
                found = yield Ask("all", tuple(space.candidates[0].cells.values()))
                seen.extend(name for figures in found.values() if figures for name in figures.others)
                reached.update(*map(dir, found.values()))

            return [strand()]

    run_search(Nosy(), PLAN, RECORDS)

    assert "parameters/remaining" in seen
    assert not [name for name in seen if "test" in name]
    assert {name for name in reached if not name.startswith("_")} == {
        *("metric", "value", "dense", "difference", "gain", "others", "quantity", "machine")
    }, "no record, which has figures on test"


def test_a_decision_survives_the_store() -> None:
    decisions, _ = run_search(Matching(), PLAN, RECORDS)

    assert read_as(Decision, asdict(decisions[-1])) == decisions[-1]
    assert all(look.concluded and look.seen for look in decisions[-1].looks)


def test_what_is_not_run_says_why() -> None:
    decisions, ran = run_search(Matching(), PLAN, RECORDS)
    stopped = decisions[-1].stopped
    unrun = {trial.name for trial, work in zip(PLAN.trials, PLAN.work, strict=True) if not ran.keys() >= {*work}}

    assert stopped.keys() == unrun
    assert stopped["l1_unstructured sparsity=0.9 seed=7"].startswith("the confirmation of l1_unstructured ended at")


def test_a_paused_trial_keeps_the_weights_that_it_needs() -> None:
    plan = grid(("l1_unstructured", "random_unstructured"), (0.5,), 4, rounds=3)
    _, ran = run_search(Halving("rounds"), plan, records_of(plan, crossing(0.6)))
    paused = {trial.stages[1] for trial in plan.trials if trial.stages[2] not in ran}

    assert len(paused) == 4
    assert paused <= needed_weights(ran, [plan])


def test_a_failure_that_repeats_is_a_result_and_another_one_is_waited_for() -> None:
    key = next(trial.stages[1] for trial in PLAN.trials if trial.name == "l1_unstructured sparsity=0.6 seed=1")
    known, _ = run_search(Matching(), PLAN, RECORDS, failed=[key])
    held = {name: record for name, record in RECORDS.items() if name != key}
    waiting = decide(Matching(), SearchSpace(PLAN), Budget(), held, ())

    assert known[-1].ended
    assert any(look.seen.get(key, 0) is None for look in known[-1].looks)
    assert not waiting.ended
    assert waiting.run == (key,)


@pytest.mark.parametrize(
    ("budget", "text"),
    [
        (Budget(trials=20), "search.trials=20 is too small for the next step, which brings the trials to"),
        (Budget(steps=2000), "search.steps=2000 is spent: "),
        (Budget(seconds=20), "search.seconds=20 is spent: "),
    ],
)
def test_a_budget_ends_the_search_and_the_answer_says_so(budget: Budget, text: str) -> None:
    decisions, ran = run_search(Matching(), PLAN, RECORDS, budget=budget)
    free, more = run_search(Matching(), PLAN, RECORDS)

    assert decisions[-1].ended
    assert ran.keys() < more.keys()
    assert all(text in answer for answer in decisions[-1].answers)
    assert all(text in reason for reason in decisions[-1].stopped.values())
    assert free[-1].looks[: len(decisions[-1].looks)] == decisions[-1].looks, "a larger budget goes on from there"


class Shortest:
    """Search of one's own: the sparsest candidate with its first seed."""

    def __init__(self, wanted: float = 0.9) -> None:
        self.wanted = wanted

    def refusals(self, space: SearchSpace) -> Iterable[str]:
        """Refuse a plan without the wanted sparsity."""
        if not self._cells(space):
            yield f"`search.wanted` (={self.wanted}) is no sparsity of the sweep; pass search.wanted=0.9."

    def strands(self, space: SearchSpace) -> Sequence[Strand]:
        """Look once."""

        def strand() -> Strand:
            cells = self._cells(space)
            seen = yield Ask("look", cells)
            yield Conclude(f"{len(seen)} seen")
            yield Answer("done", tuple(cell.network for cell in cells))

        return [strand()]

    def bounds(self, space: SearchSpace) -> tuple[Iterable[Cell], Iterable[Cell]]:
        """Return the one look twice."""
        return self._cells(space), self._cells(space)

    def _cells(self, space: SearchSpace) -> tuple[Cell, ...]:
        return tuple(each.cells[0] for each in space.candidates if each.sparsity == self.wanted)


def own(**changes: object) -> dict[str, object]:
    return settings(kind=None, name=None, depends=[], trials=None, steps=None, seconds=None, **changes)


def planned(config: dict[str, object], **given: object):  # type: ignore[no-untyped-def]
    return planned_search(config, PLAN, {search_digest(config): PastSearch((), ())})


def test_a_class_with_three_methods_is_a_search() -> None:
    search = planned(own(_target_="test_search_replay.Shortest", wanted=0.9))
    decisions, ran = run_search(search.policy, PLAN, RECORDS)

    assert decisions[-1].answers == ("done",)
    assert search.bounds() == (set(ran), set(ran))
    assert len(ran) == 3, "one dense network, two rounds"


def test_the_search_on_the_page_finds_the_best_candidate() -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "which-method.md").read_text()
    shown, names = page.partition("```python search\n")[2].partition("```")[0], dict[str, Any]()
    exec(shown, names)
    policy = names["FirstSeeds"](count=2)
    decisions, _ = run_search(policy, PLAN, RECORDS)

    assert [*policy.refusals(SearchSpace(PLAN))] == []
    assert [*names["FirstSeeds"](count=9).refusals(SearchSpace(PLAN))]
    assert decisions[-1].answers[0].startswith("best: ")
    assert len(decisions[-1].networks) == 8


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (own(_target_="test_search_replay.Shortest", wanted=0.77), r"`search.wanted` \(=0.77\) is no sparsity"),
        (own(_target_="test_search_replay.Nothing"), r"`search._target_` \(=test_search_replay.Nothing\)"),
        (settings(kind="matching", explore=3, tries=1, trials=5), r"`search.trials` \(=5\) must be at least 6"),
        (settings(kind="matching", explore=7, tries=1), "`seed` has 8 values for l1_unstructured, too few to explore"),
        (settings(kind="halving", rungs="rounds", first=1, factor=3), "beyond the 1 round of .* schedule.rounds=4"),
    ],
)
def test_a_search_that_cannot_work_is_refused_with_the_remedy(config: dict[str, object], text: str) -> None:
    with pytest.raises(Exception, match=text) as caught:
        planned(config)

    assert caught.type.__name__ in (ConfigError.__name__, "TargetError")


def test_no_search_is_none() -> None:
    assert planned_search({"search": {"kind": "none"}}, PLAN, {}) is None
    assert planned_search({}, PLAN, {}) is None, "an older configuration"


@pytest.mark.slow  # 10,000 trials take seconds to plan
def test_a_decision_among_ten_thousand_networks_takes_little_time() -> None:
    plan = grid([f"method_{index}" for index in range(500)], (0.5, 0.6, 0.7, 0.8, 0.9), seeds=4)
    records = records_of(plan, crossing(0.6))
    space, took = SearchSpace(plan), list[float]()
    for policy in (Matching(explore=2), Halving(), Frontier(["macs", "parameters"])):
        replay, held = Replay(policy, space, Budget()), dict[str, StageRecord]()
        while not (decision := replay.next(held)).ended:
            held |= {key: records[key] for key in decision.run}
            begun = time.process_time()
            replay.next(held)
            took.append(time.process_time() - begun)

    assert len(plan.trials) == 10_000
    assert sorted(took)[-2] < 0.3  # 50 ms on a quiet machine, with room for a busy one; the first one imports SciPy
