"""Retention: weights that a stage starts from stay, and so do all masks and records."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import trial_of
from hypothesis import given
from hypothesis import strategies as st
from store_cases import FILES, Content, altered, chain, fresh, key_of, record_for, record_of

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import STATE, STATE_VALUES, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, REWIND, Plan, StageSpec
from orchestrator.core.work_order import PastFailure
from orchestrator.store import retention
from orchestrator.store.retention import needed_weights, prune, sizes, verify
from orchestrator.store.store import Store


def plan_of(*trials: list[StageSpec]) -> Plan:
    stages = {spec.key: spec for trial in trials for spec in trial}
    return Plan(stages, tuple(trial_of(f"t{i}", trial) for i, trial in enumerate(trials)))


def with_weights(store: Store, specs: list[StageSpec]) -> list[bool]:
    return [WEIGHTS in store.finished([spec.key])[spec.key].files for spec in specs]


def test_what_would_be_pruned_is_said_without_setting_damage_aside(store: Store) -> None:
    (spec,) = chain()
    store.commit(record_for(spec), FILES)
    store.backend.write(f"stages/{spec.key}/record.json", b"{")
    prune(store, dry_run=True)
    assert store.backend.names("quarantine") == []
    prune(store)
    assert len(store.backend.names("quarantine")) == 1


def test_weights_of_dense_stages_branch_points_and_ends_stay(store: Store) -> None:
    long = chain(1, 2, 3, 4)
    branch = chain(3, 4, seed=1, parent=long[2])
    short = chain(1, seed=2)
    plan = plan_of(long, [*long[:3], *branch], short, long[:4])  # the last trial ends in the middle of the first
    for spec in plan.stages.values():
        store.commit(record_for(spec), FILES)
    store.save_sweep("s", {"plan": plan.to_json()})
    dropped = [long[1], branch[0]]
    would = prune(store, dry_run=True)
    assert set(would.stages) == {spec.key for spec in dropped}
    assert would.bytes == 2 * len(FILES[WEIGHTS])
    assert all(with_weights(store, long))
    assert prune(store) == would
    assert with_weights(store, long) == [True, False, True, True, True]
    assert with_weights(store, branch) == [False, True]
    assert with_weights(store, short) == [True, True]
    for spec in plan.stages.values():
        assert store.read(spec.key, "masks.safetensors") == FILES["masks.safetensors"]
    assert prune(store).stages == ()
    assert len(store.resumable(plan)) == len(plan.stages)


def test_a_start_s_weights_and_state_go_once_all_that_need_them_are_finished_and_come_back(store: Store) -> None:
    start, plain = StageSpec("start", {"until": 2}), StageSpec("dense", {})
    dense = replace(plain, starts_from=(start.key,))
    rewound = [StageSpec("round", {"round": 1, "n": n}, {NETWORK: dense.key, REWIND: start.key}) for n in range(3)]
    plan = plan_of(*([start, dense, each] for each in rewound[:2]))
    files = {WEIGHTS: FILES[WEIGHTS], STATE: Content(b"momentum"), STATE_VALUES: Content(b"{}")}
    for spec in (start, dense, *rewound[:2]):
        assert prune(store, [plan]).stages == (), "something needs it, or could go on from it"
        store.commit(record_for(spec), files)

    assert prune(store, [plan], dry_run=True).bytes == len(FILES[WEIGHTS]) + len(b"momentum")
    assert prune(store, [plan]).stages == (start.key,)
    assert set(store.finished([start.key])[start.key].files) == {STATE_VALUES}
    with pytest.raises(StoreError, match="its weights were dropped"):
        store.fetch(start.key, STATE)
    later = plan_of([start, dense, rewound[0]], [start, dense, rewound[2]])
    assert start.key not in store.resumable(later)
    assert len(store.resumable(plan)) == 4
    store.commit(record_for(start), files)
    assert store.read(start.key, STATE) == b"momentum"
    assert start.key in store.resumable(later)


def test_the_newest_stage_of_an_unfinished_trial_stays(store: Store) -> None:
    specs = chain(1, 2, 3)
    plan = plan_of(specs)
    for spec in specs[:3]:
        store.commit(record_for(spec), FILES)
    prune(store, [plan])
    assert with_weights(store, specs[:3]) == [True, False, True]
    assert list(store.resumable(plan)) == [spec.key for spec in specs[:3]]


def test_every_saved_sweep_counts(store: Store) -> None:
    specs = chain(1, 2, 3)
    later = chain(2, seed=7, parent=specs[1])
    for spec in specs:
        store.commit(record_for(spec), FILES)
    store.save_sweep("later", {"plan": plan_of([*specs[:2], *later]).to_json()})
    prune(store, [plan_of(specs)])
    assert with_weights(store, specs) == [True, True, False, True]


def test_a_sweep_that_has_ended_is_pruned_by_itself(store: Store) -> None:
    specs, unrelated = chain(1, 2, 3, 4), chain(1, 2, seed=3)
    later = chain(3, seed=7, parent=specs[2])
    for spec in (*specs, *unrelated):
        store.commit(record_for(spec), FILES)
    plan = plan_of(specs)
    store.save_sweep("later", {"plan": plan_of([*specs[:3], *later]).to_json()})
    records = store.finished(plan.stages)
    assert retention.prune_sweep(Store(store.uri, "all", store.options), plan, records) == set()
    assert retention.prune_sweep(store, plan, records) == {specs[1].key, specs[3].key}
    assert with_weights(store, specs) == [True, False, True, False, True]
    assert all(with_weights(store, unrelated))
    assert prune(store).stages == (unrelated[1].key,)


def test_keep_all_keeps_all(store: Store) -> None:
    specs = chain(1, 2, 3)
    for spec in specs:
        store.commit(record_for(spec), FILES)
    assert prune(Store(store.uri, keep="all", options=store.options)).bytes == 0
    assert all(with_weights(store, specs))


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"`store\.keep` \(='some'\) must be one of needed, all"):
        Store(str(tmp_path), keep="some")  # type: ignore[arg-type]


@st.composite
def forests(draw: st.DrawFn) -> tuple[Plan, set[str]]:
    """Strategy for a plan whose stages form a random forest, and its finished stages, parents before children."""
    specs = [StageSpec("dense", {"n": 0})]
    above: dict[str, StageSpec] = {}
    for number in range(1, draw(st.integers(1, 14))):
        parent = draw(st.sampled_from(specs))
        specs.append(StageSpec("round", {"n": number, "round": parent.round + 1}, {NETWORK: parent.key}))
        above[specs[-1].key] = parent
    chains = []
    for end in draw(st.lists(st.sampled_from(specs), min_size=1, max_size=5)):
        path = [end]
        while path[0].key in above:
            path.insert(0, above[path[0].key])
        chains.append(path)
    plan = plan_of(*chains)
    finished: set[str] = set()
    for key, spec in plan.stages.items():
        if (spec.parent is None or spec.parent in finished) and draw(st.booleans()):
            finished.add(key)
    return plan, finished


@given(forests())
def test_a_sweep_resumes_without_repeating_anything_whatever_was_pruned(forest: tuple[Plan, set[str]]) -> None:
    plan, finished = forest
    records: dict[str, StageRecord] = {key: record_for(plan.stages[key]) for key in finished}
    needed = needed_weights(records, [plan])
    todo = plan.without(finished)
    assert {spec.parent for spec in todo.stages.values() if spec.parent in finished} <= needed
    assert {trial.stages[-1] for trial in plan.trials} & finished <= needed


@pytest.fixture
def old_now(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the modification time of all files to two days ago."""
    now = time.time
    monkeypatch.setattr(retention.time, "time", lambda: now() + 2 * 86400)
    return


def leave(store: Store) -> list[str]:
    """Write files as dead processes leave them."""
    paths = ["tmp/abc/weights.safetensors", "tmp/def", "probes/p", f"stages/{key_of(8)}/half/{WEIGHTS}"]
    paths += [f"stages/{key_of(0)}/other/{WEIGHTS}", f"leases/stages/{key_of(3)}"]
    for path in paths:
        store.backend.write(path, b"left")
    return paths


def test_what_may_still_be_in_use_stays(store: Store) -> None:
    store.commit(record_of(key_of(0)), FILES)
    leave(store)
    assert prune(store).leftovers == ()


@pytest.mark.usefixtures("old_now")
def test_leftovers_of_the_dead_go(store: Store) -> None:
    store.commit(record_of(key_of(0)), FILES)
    store.save_sweep("s", {})
    paths = leave(store)
    pruned = prune(store)
    assert sorted(pruned.leftovers) == sorted(paths)
    assert pruned.bytes == 4 * len(paths)
    assert {entry.path for entry in store.backend.entries()}.isdisjoint(paths)
    assert store.backend.names("tmp") == []
    assert store.read(key_of(0), WEIGHTS) == FILES[WEIGHTS]
    assert store.load_sweep("s")["name"] == "s"


def test_leases_stay_while_a_driver_lives(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    with store.leases() as leases:
        assert leases.acquire(key_of(0))
        old = time.time() - 5 * 86400
        os.utime(tmp_path / "leases" / "stages" / key_of(0), (old, old))
        assert prune(store).leftovers == ()
        assert leases.holder(key_of(0)) == leases.owner


def test_sizes_are_reported_by_category(store: Store) -> None:
    for number in range(3):
        store.commit(record_of(key_of(number)), FILES)
    store.save_sweep("s", {})
    found = sizes(store)
    assert found["weights"] == (3, 3 * len(FILES[WEIGHTS]))
    assert found["masks and others"] == (3, 3 * len(FILES["masks.safetensors"]))
    assert found["records"][0] == 3
    assert found["sweeps"][0] == 1
    store.save_preflights([key_of(1)])
    found = sizes(store)
    assert found["preflights"][0] == 1
    assert "running or leftover" not in found
    assert found["other"][0] == 1  # store.json


def test_every_damage_is_found(store: Store) -> None:
    for number in range(4):
        store.commit(record_of(key_of(number)), FILES)
    commit = store.stages.standing(key_of(2))
    assert commit is not None
    store.backend.write(commit.path("masks.safetensors"), altered(FILES, "masks.safetensors")["masks.safetensors"])
    store.backend.write(f"stages/{key_of(1)}/record.json", b"{}")
    damages = verify(store)
    assert len(damages) == 2
    assert any(key_of(2) in damage and "masks.safetensors" in damage for damage in damages)
    assert any(key_of(1) in damage and "record.json" in damage for damage in damages)
    assert set(fresh(store).finished(map(key_of, range(4)))) == {key_of(0), key_of(3)}
    assert verify(store) == []


def test_with_all_kept_the_oldest_unneeded_weights_go_as_far_as_the_limit_asks(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    specs = chain(1, 2, 3, 4)
    plan = plan_of(specs)
    for age, spec in enumerate(specs):
        store.commit(record_for(spec, started=2e9 - age), FILES)
    size = sum(entry.bytes for entry in store.backend.entries())

    def limited(most: int | str | None) -> list[bool]:
        retention.limit(Store(store.uri, "all", store.options, most), plan)
        return with_weights(store, specs)

    assert limited(None) == limited("1GB") == [True] * 5
    assert limited(size - 1) == [True, True, True, False, True]
    assert "max_bytes" not in caplog.text
    assert limited("1kB") == [True, False, False, False, True]
    assert "more than `store.max_bytes` (=1kB): records, masks and needed weights always stay" in caplog.text
    assert all(store.read(spec.key, "masks.safetensors") for spec in specs)


def test_checkpoints_and_failures_stay_while_a_sweep_goes_on_from_them(tmp_path: Path) -> None:
    """Check a finished dense stage, an unfinished round, and a stage that is in no sweep any more."""
    store = Store(str(tmp_path / "store"))
    specs = chain(1)
    plan = Plan({spec.key: spec for spec in specs}, (trial_of("a", specs),))
    store.save_sweep("a", {"plan": plan.to_json()})
    store.commit(record_for(specs[0]), FILES)
    other = key_of(7)
    for key in (*plan.stages, other):
        store.checkpoints.save(key, 3, {}, FILES[WEIGHTS])
        store.failures.save(key, PastFailure("Diverged", "it diverged", 0.0, {}))
    pruned = prune(store)

    assert {path.split("/")[1] for path in pruned.leftovers} == {specs[0].key, other}
    assert pruned.bytes > 2 * len(FILES[WEIGHTS])
    assert [key for key in plan.stages if store.checkpoints.reached(key).number >= 0] == [specs[1].key]
    assert store.failures.known() == [specs[1].key]
    assert {"checkpoints", "failures"} < sizes(store).keys()
    assert prune(store).leftovers == ()


def test_a_sweep_that_ends_leaves_no_checkpoint_or_failure_of_what_is_finished(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"), keep="all")
    (spec,) = chain()
    record = store.commit(record_for(spec), FILES)
    store.checkpoints.save(spec.key, 3, {}, FILES[WEIGHTS])
    store.failures.save(spec.key, PastFailure("Diverged", "it diverged", 0.0, {}))
    retention.prune_sweep(store, Plan({spec.key: spec}, (trial_of("a", [spec]),)), {spec.key: record})

    assert store.checkpoints.reached(spec.key).number == -1
    assert store.failures.of(spec.key) is None
