"""Rungs of a training: candidates are compared after parts of it, and only the best ones train on."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sampling import sampled
from searched_plans import grid, in_parts, noisy, records_of, run_search, titles
from small_trials import planned, small, train

from orchestrator.compare.audit.checklist import audit
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.compare.trial_rows import statuses
from orchestrator.config.schema import ConfigError
from orchestrator.core.events import PastSearch
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Job, Plan
from orchestrator.core.stage_kinds import PART
from orchestrator.planning.preview import preview
from orchestrator.store import saved_sweep
from orchestrator.store.retention import needed_weights
from orchestrator.store.store import Store
from orchestrator.sweep import conductor
from orchestrator.sweep.search.building import planned_search, search_digest
from orchestrator.sweep.search.candidates import SearchSpace
from orchestrator.sweep.search.frontier import Frontier
from orchestrator.sweep.search.halving import Halving
from orchestrator.sweep.search.policy import Budget

METHODS = tuple(f"method_{index}" for index in range(4))
RACE = Halving("training", factor=2)


def by_index(method: str, sparsity: float, seed: int) -> float:
    """Lose a point for each index; equal at all seeds."""
    return int(method[-1]) / 100


def raced(seeds: int = 2, rounds: int = 1, **search: Any) -> Plan:
    """Return a plan of four methods that fine-tune for four epochs."""
    return in_parts(grid(METHODS, (0.5,), seeds, rounds), **{"factor": 2, **search})


def kinds(ran: Mapping[str, StageRecord]) -> dict[str, int]:
    """Return kind -> number of stages that were run."""
    return {kind: sum(each.kind == kind for each in ran.values()) for kind in ("dense", "round", PART)}


def test_only_the_best_train_on() -> None:
    plan = raced()
    decisions, ran = run_search(RACE, plan, records_of(plan, by_index))
    last = decisions[-1]

    assert titles(last) == [
        "rung 1 of 3: 4 candidates, 1 epoch",
        "rung 2 of 3: 2 candidates, 2 epochs",
        "rung 3 of 3: 1 candidate, 4 epochs",
    ]
    assert kinds(ran) == {"dense": 2, "round": 2, PART: 2 * 4 + 2 * 2}
    assert last.answers[0].startswith("best: method_0 at 50.00%, +0.00 points against dense")
    assert last.stopped["method_3 sparsity=0.5 seed=1"] == "ruled out after 1 epoch"
    assert last.stopped["method_1 sparsity=0.5 seed=0"] == "ruled out after 2 epochs"
    assert {plan.stages[key].kind for key in last.networks} == {"round"}


def test_earlier_rounds_run_whole() -> None:
    plan = raced(rounds=3)
    _, ran = run_search(RACE, plan, records_of(plan, by_index))

    assert kinds(ran) == {"dense": 2, "round": 2 * (4 * 2 + 1), PART: 12}


def test_decisions_are_equal_in_any_order_and_after_any_kill() -> None:
    plan = raced()
    records = records_of(plan, lambda *place: noisy(place))
    for policy in (RACE, Halving("training", factor=2, confidence=0.9), Frontier(rungs="training", factor=2)):
        plain, ran = run_search(policy, plan, records)
        for seed in range(4):
            found, again = run_search(policy, plan, records, shuffle=random.Random(seed), kills=seed % 2 == 0)
            assert found[-1] == plain[-1]
            assert again.keys() == ran.keys()


@pytest.mark.parametrize("policy", [RACE, Halving("training", factor=5), Frontier(rungs="training", factor=2)])
@pytest.mark.parametrize("methods", [METHODS, METHODS[:1]])
def test_the_bounds_hold(policy: Halving | Frontier, methods: tuple[str, ...]) -> None:
    plan = in_parts(grid(methods, (0.5,), 2), factor=policy.factor)
    space = SearchSpace(plan)
    least, most = ({key for cell in cells for key in space.stages(cell)} for cells in policy.bounds(space))
    for loss in (by_index, lambda *_: 0.0, lambda *place: noisy(place)):
        _, ran = run_search(policy, plan, records_of(plan, loss))
        assert len(least) <= len(ran) <= len(most)


def test_a_rung_that_one_candidate_is_left_for_is_in_no_bound() -> None:
    plan = in_parts(grid(METHODS[:3], (0.5,), 2), factor=3)
    space = SearchSpace(plan)
    least = {key for cell in Halving("training").bounds(space)[0] for key in space.stages(cell)}
    _, ran = run_search(Halving("training"), plan, records_of(plan, by_index))

    assert least == ran.keys()


def test_a_budget_counts_the_steps_of_a_training_once() -> None:
    """Two dense trainings of 300 steps, then 4 x 2 epochs of 25 steps, then 2 x 2 more of them, make 900."""
    plan = raced()
    records = records_of(plan, by_index)
    ended = [run_search(RACE, plan, records, budget=Budget(steps=steps))[0][-1] for steps in (900, 901)]
    found = compare_trials(plan, run_search(RACE, plan, records)[1], {})

    assert "search.steps=900 is spent: 900 steps" in ended[0].answers[0]
    assert "best" in ended[1].answers[0]
    assert found.cost.steps == 600 + 4 * 2 * 25 + 2 * 2 * 25 + 2 * 50


def test_a_part_that_fails_is_a_failure_of_its_trial() -> None:
    plan = raced()
    part = plan.trials[0].parts[0]
    decisions, ran = run_search(RACE, plan, records_of(plan, by_index), failed=[part])

    assert decisions[-1].ended
    assert decisions[-1].answers[0].startswith("best: method_1")
    assert statuses(plan, ran, {part: "diverged"})[plan.trials[0].name] == "failed"


def test_the_audit_says_that_a_search_has_stopped_the_random_control() -> None:
    plan = in_parts(grid(("l1_unstructured", "random_unstructured"), (0.5,), 2), factor=2)
    lost = {"l1_unstructured": 0.0, "random_unstructured": 0.1}
    decisions, ran = run_search(RACE, plan, records_of(plan, lambda method, *_: lost[method]))
    found = audit(plan, ran, compare_trials(plan, ran, {}, search=decisions[-1]))

    (reason,) = (each.reason for each in found if each.rule == "a random control")
    assert reason == "none among l1_unstructured: the search has stopped it"


def test_what_is_paused_keeps_the_state_that_it_continues_from() -> None:
    plan = raced()
    _, ran = run_search(RACE, plan, records_of(plan, by_index))
    needed = needed_weights(ran, [plan])
    paused = {trial.parts[0] for trial in plan.trials if trial.stages[-1] not in ran}

    assert len(paused) == 6
    assert paused <= needed
    assert not {key for trial in plan.trials if trial.stages[-1] in ran for key in trial.parts} & needed


def test_the_plan_counts_parts_apart() -> None:
    plan = planned(*(small(*SWEPT, f"method={method}") for method in METHODS_OF_SWEEP))
    text = preview("sweep", plan, ())

    assert "stages    4 unique of 6 asked for, 2 shared; 1 dense training, 3 rounds, 6 parts" in text
    assert Plan.from_json(plan.to_json()) == plan


SWEPT = ("search=halving", "search.rungs=training", "search.factor=2", "finetune.epochs=4", "tracking=none")
METHODS_OF_SWEEP = ("random_unstructured", "l1_unstructured", "global_l1_unstructured")


def sweep(*overrides: str) -> list[Job]:
    """Return the jobs of a sweep of a moment."""
    own = ("cluster=inline", "finetune.epochs=4", "tracking=none", *overrides)
    axes = [(f"method={method}", f"seed={seed}") for method in METHODS_OF_SWEEP for seed in (0, 1)]
    return [Job(words, small(*own, *words)) for words in axes]


@pytest.mark.slow
def test_a_search_that_is_turned_off_goes_on_from_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("orchestrator.views.report.report_files.draw", lambda *_: {})  # takes longer than all else
    searched = conductor.run(sweep(*SWEPT[:3]))
    store = Store("store")
    stopped = [trial for trial in searched.plan.trials if trial.stages[-1] not in searched.records]
    grid = conductor.run(sweep())
    alone = train(planned(*(job.config for job in sweep())), Store(str(tmp_path / "alone")))  # type: ignore[misc]

    assert searched.status == grid.status == "finished"
    assert stopped
    assert not any(trial.parts for trial in grid.plan.trials)
    for key, record in alone.items():
        assert store.finished([key])[key].result() == record.result()
    for trial in stopped:
        part = searched.records[trial.parts[0]]
        assert store.finished([trial.stages[-1]])[trial.stages[-1]].seconds > part.seconds
    assert "up to epoch 1" in capsys.readouterr().out
    begun = store.finished(part for trial in searched.plan.trials for part in trial.parts)
    assert begun
    assert not any(WEIGHTS in part.files for part in begun.values())
    (name,) = store.sweeps()
    saved_sweep.delete(store, name)
    assert not store.stages.known(), "parts of the earlier search belong to the sweep"


@sampled(3)
@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (("search.first=4",), "search.first (=4) is not before the end of the last training of"),
        (("finetune.epochs=0",), "which has 0 epochs; pass a longer finetune.epochs."),
        (("search.first=9", "finetune.epochs=null", "finetune.steps=9"), "which has 9 steps; pass search.first=1, or"),
        (
            ("finetune._target_=small_workloads.linear",),
            "is a function of your own, or begins at a step while",
        ),
        (("restart=rewind", "restart.step=3", "train.epochs=6"), "begins at a step while `epochs` gives its length"),
        (("search.confidence=0.9", "seed=5"), "needs 2 or more seeds at the first rung"),
    ],
)
def test_what_cannot_be_raced_is_refused(overrides: tuple[str, ...], text: str) -> None:
    plan = planned(*(small(*SWEPT, f"method={method}", *overrides) for method in METHODS_OF_SWEEP))
    config = plan.trials[0].config
    with pytest.raises(ConfigError, match="search") as refused:
        planned_search(config, plan, {search_digest(config): PastSearch((), ())})

    assert text in str(refused.value)


def test_trainings_of_different_lengths_are_refused() -> None:
    plan = planned(*(small(*SWEPT, f"finetune.epochs={epochs}") for epochs in (4, 6)))
    told = [*RACE.refusals(SearchSpace(plan))]

    assert len(told) == 1
    assert "the last training of some is longer than that of others; pass one finetune.epochs" in told[0]


@pytest.mark.parametrize("wrong", ["search.first=some", "search.first=0", "search.factor=1", "search.factor=true"])
def test_rungs_of_a_search_of_ones_own_are_refused_before_they_are_planned(wrong: str) -> None:
    """No row of the catalogue has the rules of such a search, and a factor of 1 never reaches the end."""
    key, _, value = wrong.partition("=")
    job = small(
        "search.kind=null", "+search._target_=test_search_replay.Shortest", "+search.rungs=training", f"+{wrong}"
    )
    with pytest.raises(ConfigError, match="must be a whole number") as refused:
        planned(job)

    assert f"`{key}` (={value.title() if value == 'true' else value}) must be a whole number" in str(refused.value)
