"""Restarts: trials share starts, keys have one canonical form, and impossible restarts are refused."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from sampling import sampled
from small_trials import composed, planned

from orchestrator.config.schema import Config, ConfigError
from orchestrator.config.training import Train
from orchestrator.core.plain_data import read_as
from orchestrator.core.specs import Plan
from orchestrator.planning.preview import preview
from orchestrator.trial.restarts import place, restart_of


def parsed(config: Mapping[str, Any]) -> Config:
    return read_as(Config, config)


def kinds(plan: Plan) -> list[str]:
    return [spec.kind for spec in plan.stages.values()]


def test_without_a_restart_nothing_is_said_of_one() -> None:
    plan = planned(composed())
    rounds = [plan.stages[key] for key in plan.trials[0].stages[1:]]

    assert kinds(plan) == ["dense", "round", "round", "round"]
    assert all("restart" not in spec.fields and set(spec.inputs) == {"network"} for spec in rounds)
    assert plan.stages[plan.trials[0].dense].starts_from == ()


def test_trials_share_the_start_that_they_rewind_to_and_their_dense_training_goes_on_from_it() -> None:
    kept, *rewound = (composed(), *(composed("restart=rewind", "restart.step=2ep", f"method={m}") for m in METHODS))
    plan = planned(kept, *rewound)
    (dense,) = {trial.dense for trial in plan.trials}
    (start,) = (key for key, spec in plan.stages.items() if spec.kind == "start")

    assert kinds(plan) == ["start", "dense"] + 9 * ["round"]
    assert plan.stages[dense].starts_from == (start,)
    assert dense == planned(kept).trials[0].dense
    assert plan.needs(dense) == (start,)
    for trial in plan.trials[1:]:
        for key in trial.stages[1:]:
            spec = plan.stages[key]
            assert spec.inputs["rewind"] == spec.inputs["rates"] == start
            assert "finetune" not in spec.fields
            assert spec.training == "train"
    assert plan.trials_of[start] == (1, 2)
    assert plan.trials_of[dense] == (0, 1, 2)
    assert Plan.from_json(plan.to_json()).work == plan.work


METHODS = ("l1_unstructured", "random_unstructured")


@pytest.mark.parametrize(("rates", "optimizer"), [("0", "restored"), ("0.0", "restored"), ("1ep", "fresh")])
def test_at_the_start_of_a_training_no_optimizer_is_fresh_or_restored(rates: str, optimizer: str) -> None:
    config = composed("restart=lr_rewind", f"restart.rates={rates}", "restart.optimizer=fresh")

    assert restart_of(parsed(config), last=True)["optimizer"] == optimizer


def test_the_rounds_of_a_rewound_trial_run_in_one_task() -> None:
    plan = planned(composed("restart=rewind", "restart.step=2ep"))
    start, dense, *rounds = plan.stages

    assert list(plan.segments()) == [(start,), (dense, *rounds)]
    assert list(plan.without({start}).segments()) == [(dense, *rounds)]


def test_what_is_pruned_first_is_compared_with_the_dense_training() -> None:
    plan = planned(composed("schedule=one_shot", "schedule.at=start"), composed("schedule=one_shot"))
    start, last = plan.trials[0].stages

    assert plan.stages[start].fields["until"] == 0
    assert plan.stages[last].fields["restart"] == {"weights": "keep", "rates": 0, "optimizer": "restored"}
    assert plan.stages[last].inputs == {"network": start, "rates": start}
    assert plan.trials[0].dense == plan.trials[1].dense
    assert set(plan.work[0]) == {start, last, plan.trials[0].dense}
    assert plan.trials[0].identity != plan.trials[1].identity


def test_equal_places_have_one_form() -> None:
    epochs, steps = Train(epochs=15, steps=None), Train(epochs=None, steps=200)

    assert [place(each, epochs) for each in (0, 0.0, "0ep", 7, 0.2, "3ep", "3.0ep", 1.0, 0.1)] == [
        *(0, 0, 0, 7),
        *("3ep", "3ep", "3ep", "15ep", "1.5ep"),
    ]
    assert [place(each, steps) for each in (0, 0.1, 1.0)] == [0, 20, 200]


def test_a_control_is_of_the_last_round_alone() -> None:
    plans = [planned(composed("restart=rewind", f"restart.control={each}")) for each in ("none", "shuffle", "reinit")]
    chains = [plan.trials[0].stages for plan in plans]

    assert len({chain[:-1] for chain in chains}) == 1
    assert len({chain[-1] for chain in chains}) == 3
    assert restart_of(parsed(composed("restart=reinit")), last=False) == restart_of(
        parsed(composed("restart.control=reinit")), last=True
    )


@sampled(8)
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("restart.weights=step",), "`restart.step` (=None) must be given if and only if `restart.weights` (=step)"),
        (("restart.step=5",), "`restart.step` (=5) must be given if and only if `restart.weights` (=keep)"),
        (("restart=rewind", "restart.step=-1"), "`restart.step` (=-1) must be a step as an int"),
        (("restart=rewind", "restart.step=1.5"), "`restart.step` (=1.5) must be a step as an int"),
        (("restart=rewind", "restart.step=soon"), "`restart.step` (=soon) must be a step as an int"),
        (("restart=rewind", "restart.step=16ep"), "`restart.step` (=16ep) must be at most `train.epochs` (=15)"),
        (
            ("restart=rewind", "restart.step=11", "train.epochs=null", "train.steps=10"),
            "`restart.step` (=11) must be at most `train.steps` (=10)",
        ),
        (
            ("restart=lr_rewind", "restart.rates=2ep", "train.epochs=null", "train.steps=10"),
            "`restart.rates` (=2ep) counts epochs, but `train.steps` (=10) gives the length of the training",
        ),
        (("restart=rewind", "train=none"), "which trains nothing (train.epochs=0)"),
        (("schedule=one_shot", "schedule.at=start", "train=none"), "which trains nothing (train.epochs=0)"),
        (("schedule.at=start",), "`schedule.rounds` (=3) must be 1 with schedule.at=start"),
        (("schedule.at=start",), "pass schedule.rounds=1 schedule.inner=3 to score several times without training"),
        (("restart=reinit", "finetune.teacher=dense"), "`finetune.teacher` (=dense) is for rounds that fine-tune"),
        (
            ("restart=rewind", "restart.step=5", "train._target_=small_workloads.linear"),
            "`restart.step` (=5) must be 0 with `train._target_` (=small_workloads.linear)",
        ),
        (("restart.control=shuffle",), "would bring back weights that earlier rounds set to zero"),
        (
            ("restart.control=invert", "method=random_unstructured"),
            "`method` (=random_unstructured) has no scores",
        ),
        (("restart.control=swap",), "`restart.control` (=swap) must be one of none, shuffle, reinit, invert, small"),
        (
            ("+control=small", "method=magnitude"),
            "the pruned channels, but `unit` (=entry) prunes no whole channels; pass method=magnitude unit=group",
        ),
        (
            ("+control=small", "method=random_unstructured"),
            "but `method` (=random_unstructured) prunes no whole channels",
        ),
        (("+control=small", "method=ln_structured", "train=none"), "which trains nothing (train.epochs=0)"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)):
        planned(composed(*overrides))


def test_a_dry_run_shows_starts_and_the_dense_training() -> None:
    plan = planned(
        composed("restart=rewind"), composed("schedule=one_shot", "schedule.at=start", "restart.control=reinit")
    )
    text = preview("rewound", plan, ())

    assert "6 unique of 8 asked for, 2 shared; 1 dense training, 1 start, 4 rounds" in text
    assert text.count(f"{plan.trials[0].dense[:8]}*") == 2


def test_a_dry_run_says_where_the_training_decides_the_sparsity() -> None:
    densities = ("scope=given", "+scope.densities={a: 0.5}", "schedule=one_shot", "schedule.sparsity=null")
    trained, given = composed("method=soft_movement"), composed(*densities)
    rows = preview("sparse", planned(trained, given, composed("method=rigl")), ()).splitlines()[-5:-2]

    assert [row.split("  ")[-1].strip(" *") for row in rows] == ["as trained", "as given", "90.00%"]


@pytest.mark.slow
def test_methods_that_restart_give_way_to_what_is_typed() -> None:
    ticket, rates = composed("method=lottery_ticket"), composed("method=lr_rewinding")

    assert (ticket["restart"]["weights"], ticket["restart"]["step"]) == ("step", 0)
    assert (rates["restart"]["weights"], rates["restart"]["rates"]) == ("keep", 0)
    assert composed("restart=reinit", "method=lottery_ticket")["restart"] == composed("restart=reinit")["restart"]
    assert composed("method=lottery_ticket", "restart.step=2ep")["restart"]["step"] == "2ep"
    same = planned(ticket, composed("method=l1_unstructured", "restart=rewind")).trials
    assert same[0].stages == same[1].stages


def test_the_preview_says_where_a_score_of_untrained_networks_ranks_trained_ones() -> None:
    late = planned(composed("method=snip", "schedule=geometric"), composed("score=grasp"), composed())
    usual = planned(composed("method=snip"), composed())

    assert preview("late", late, ()).count("prunes    the trained network by snip, grasp (schedule.at=trained)") == 1
    assert "prunes " not in preview("usual", usual, ())


@sampled(2)
@pytest.mark.parametrize("method", ["method=ln_structured", "method=fpgm", "unit=group"])
def test_the_small_control_is_of_what_takes_out_whole_channels(method: str) -> None:
    small, pruned = (planned(composed(*each, method)).trials[0].stages for each in (("+control=small",), ()))

    assert small[:-1] == pruned[:-1]
    assert small[-1] != pruned[-1]


def test_the_longer_control_takes_the_rounds_of_a_trial_and_prunes_nothing() -> None:
    longer, pruned = (planned(composed(each)) for each in ("+control=longer", "method=l1_unstructured"))
    targets = [longer.stages[key].fields["target"] for key in longer.trials[0].stages[1:]]

    assert targets == [0.0, 0.0, 0.0]
    assert longer.trials[0].dense == pruned.trials[0].dense
    assert longer.trials[0].config["method"]["name"] == "longer"
