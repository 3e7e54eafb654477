"""Preflights: each distinct combination is tried once, for all stages with these parts."""

from __future__ import annotations

from typing import Any

import pytest
from factories import plan_of

from orchestrator.core.specs import Plan, StageSpec, TrialSpec
from orchestrator.planning.preflight_combinations import Combination, combinations

ENVIRONMENT = {"torch": "2.0", "git_commit": "a"}


def chain(name: str, *asked: dict[str, Any], seed: int = 0, own: bool = False, **dense: Any) -> list[StageSpec]:
    """Return the specs of a dense stage and of rounds with these requests, by a custom or built-in method."""
    sources = {"modules": {"mine": "1"} if own else {}, "packages": {}, "files": {}}
    found = [StageSpec("dense", {"model": {"kind": name}, "train": {"lr": 1}, "seed": seed, "sources": {}, **dense})]
    for index, each in enumerate(asked, start=1):
        method = {"_target_": "mine.Method"} if own else {"kind": "l1_unstructured"}
        fields = {"method": method, "finetune": {"lr": 1}, "seed": seed, "round": index, "sources": sources, **each}
        found.append(StageSpec("round", fields, {"network": found[-1].key}))
    return found


def tried(*chains: list[StageSpec], done: tuple[StageSpec, ...] = (), **options: Any) -> list[Combination]:
    stages = {spec.key: spec for specs in chains for spec in specs}
    trials = [
        TrialSpec(f"t{i}", (), {}, tuple(spec.key for spec in specs), specs[0].key, "")
        for i, specs in enumerate(chains)
    ]
    return combinations(Plan(stages, tuple(trials)), {spec.key for spec in done}, ENVIRONMENT, **options)


def asked(found: list[Combination]) -> list[Any]:
    return [each.specs[-1].fields.get("target", each.specs[-1].fields.get("amount")) for each in found]


def test_seeds_rounds_and_sparsities_share_one_combination() -> None:
    chains = [chain("net", {"target": s / 2}, {"target": s}, seed=seed) for s in (0.5, 0.9) for seed in (0, 1)]
    dense, pruned = tried(*chains)

    assert [len(dense.specs), len(pruned.specs)] == [1, 2]
    assert asked([pruned]) == [0.9], "the one that asks for most stands for all"
    assert [spec.kind for spec in pruned.specs] == ["dense", "round"]
    assert pruned.specs[0].fields["seed"] == pruned.specs[1].fields["seed"]
    assert dense.trials == pruned.trials == ("t0", "t1", "t2", "t3")


def test_a_larger_fraction_of_units_of_many_tensors_is_tried_again() -> None:
    entries, experts = (
        [tried(chain("net", {"target": target, "unit": {"kind": unit}}))[-1].key for target in (0.5, 0.9)]
        for unit in ("entry", "expert")
    )

    assert entries[0] == entries[1], "entries are never out of reach"
    assert experts[0] != experts[1], "fewer experts than a token is routed to are refused"


def test_a_method_of_the_users_own_is_tried_at_each_sparsity() -> None:
    assert asked(tried(chain("net", {"target": 0.4}, {"target": 0.5}, own=True))) == [None, 0.4, 0.5]


def test_counts_add_up_over_rounds() -> None:
    few, many = (tried(chain("net", *({"amount": 10},) * rounds))[-1] for rounds in (2, 3))

    assert [few.specs[-1].round, many.specs[-1].round] == [2, 3]
    assert few.key != many.key, "what fits twice may not fit thrice"
    assert len(tried(chain("net", {"amount": 0.1}, {"amount": 0.1}))) == 2, "a fraction always fits"


@pytest.mark.parametrize("change", [{"model": {"kind": "other"}}, {"train": {"lr": 2}}, {"device": "cuda"}])
def test_what_may_not_fit_is_a_combination_of_its_own(change: dict[str, Any]) -> None:
    one, other = chain("net", {"target": 0.5}), chain("net", {"target": 0.5}, **change)
    expected = 3 if "train" in change else 4  # a round's combination does not include the dense training

    assert len({each.key for each in tried(one, other)}) == expected


def test_only_what_is_still_to_run_is_tried() -> None:
    specs = chain("net", {"target": 0.5})

    assert [len(each.specs) for each in tried(specs, done=(specs[0],))] == [2]
    assert tried(specs, done=tuple(specs)) == []
    assert tried(specs, own_only=True) == []
    assert asked(tried(chain("net", {"target": 0.5}, own=True), own_only=True)) == [0.5]


def test_a_dry_run_tries_patterns_for_names_where_no_files_are_needed() -> None:
    typed: dict[str, Any] = {"model": {"kind": "mlp"}, "data": {"kind": "digits"}}
    named = {"target": 0.5, "prune": {"exclude": ["fc1.weight"]}}
    assert asked(tried(chain("net", named, **typed), own_only=True)) == [0.5]
    assert tried(chain("net", {"target": 0.5}, **typed), own_only=True) == []
    assert tried(chain("net", named, **{**typed, "data": {"kind": "mnist"}}), own_only=True) == []


def test_another_release_is_tried_again_and_another_commit_is_not() -> None:
    plan = plan_of([])
    assert combinations(plan, (), ENVIRONMENT) == []
    specs = chain("net")
    plan = Plan({specs[0].key: specs[0]}, (TrialSpec("t", (), {}, (specs[0].key,), specs[0].key, ""),))
    keys = [combinations(plan, (), ENVIRONMENT | change)[0].key for change in ({}, {"torch": "3"}, {"git_commit": "b"})]

    assert keys[0] != keys[1]
    assert keys[0] == keys[2]
