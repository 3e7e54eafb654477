"""Checkpoints: when they are saved, and bit-equal results after an interruption or a damaged checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_training_stages import chain

from orchestrator.core.errors import StoreError
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import StageSpec, start_of
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.state.checkpointing import Checkpointing
from orchestrator.training.state.train_state import NotPlain, TrainState

KEY = "a" * 64


class Clock:
    """Clock that tests advance by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(store: Store, clock: Clock, until: float, cost: float, **options: Any) -> list[float]:
    """Return the seconds at which a stage with one step a second saves checkpoints, if saving takes `cost` seconds."""
    found: list[float] = []
    checkpoints = Checkpointing(store.checkpoints, KEY, clock=clock, **{"minutes": 1, "grace": 5, **options})

    def current() -> TrainState:
        found.append(clock.now)
        clock.now += cost
        return TrainState.of({"step": len(found)})

    while clock.now < until:
        checkpoints.keep(current, ending=False)
        clock.now += 1
    checkpoints.keep(current, ending=True)
    return found


def test_a_checkpoint_is_kept_at_each_interval_and_at_the_end(store: Store) -> None:
    assert kept(store, Clock(), 150, cost=0.0) == [60, 120, 150]
    assert store.checkpoints.reached(KEY).number == 3


def test_never_is_never(store: Store) -> None:
    assert kept(store, Clock(), 150, cost=0.0, minutes=0) == []


def test_slow_checkpoints_take_a_hundredth_of_the_time_at_most(store: Store) -> None:
    times = kept(store, Clock(), 6000, cost=20.0, grace=19)

    assert len(times) == 3
    assert [second - first for first, second in pairwise(times)] == [2000, 2000]


def test_at_the_end_a_checkpoint_is_kept_if_the_last_fitted_the_grace(store: Store) -> None:
    assert len(kept(store, Clock(), 70, cost=5.0, grace=5)) == 2
    assert len(kept(store, Clock(), 70, cost=5.0, grace=4.9)) == 1
    assert len(kept(store, Clock(), 10, cost=5.0, grace=0.1)) == 1, "the cost of the first checkpoint is not known yet"


def test_what_cannot_be_kept_is_warned_of_and_fails_nothing(store: Store) -> None:
    clock = Clock()
    checkpoints = Checkpointing(store.checkpoints, KEY, minutes=1, clock=clock)

    def unplain() -> TrainState:
        raise NotPlain("optimizer/own/memory is a generator")

    def away() -> TrainState:
        raise StoreError("the disk is full")

    for current in (away, away, unplain, away):
        clock.now += 61
        checkpoints.keep(current, ending=False)
    assert len(checkpoints.warnings) == 2
    assert "the disk is full" in checkpoints.warnings[0]
    assert "memory" in checkpoints.warnings[1]
    assert store.checkpoints.reached(KEY).number == -1


def test_what_a_network_of_ones_own_raises_is_warned_of(store: Store) -> None:
    def broken() -> TrainState:
        raise RuntimeError("get_extra_state is not for now")

    checkpoints = Checkpointing(store.checkpoints, KEY, minutes=1, grace=1)
    checkpoints.keep(broken, ending=True)
    assert "RuntimeError: get_extra_state is not for now" in checkpoints.warnings[0]


def specs(holding: str = "keeper", minutes: float = 1.0) -> tuple[StageSpec, ...]:
    location = {part: {"checkpoint_minutes": minutes} for part in ("train", "finetune")}
    return tuple(replace(spec, location=location) for spec in chain(0.5, 0.75, holding=holding))


def run(
    store: Store, specs: tuple[StageSpec, ...], batches: int = 10**9, above: Sequence[StageSpec] = ()
) -> list[StageRecord]:
    """Run stages with an interruption before a batch."""
    asked, records = iter(range(10**9)), list[StageRecord]()
    order = WorkOrder(specs, Worker(store, cancelled=lambda: next(asked) >= batches, grace=5), lineage=tuple(above))
    with suppress(Cancelled):
        records.extend(run_segment(order))
    return records


def bits(record: StageRecord, store: Store) -> list[Any]:
    return [record.result(), store.read(record.key, "weights.safetensors")]


@pytest.mark.parametrize("holding", ["keeper", "hooks"])
def test_interrupted_stages_go_on_to_the_same_record(store: Store, tmp_path: Path, holding: str) -> None:
    """With epochs of 10 batches, the first attempt ends in the dense training, and each later one in a round."""
    whole, other = specs(holding), Store(str(tmp_path / "other"))
    expected = run(other, whole)
    found: list[StageRecord] = []
    for batches, key in ((4, whole[0].key), (9, whole[1].key), (16, whole[2].key)):
        left = tuple(spec for spec in whole if spec.key not in {record.key for record in found})
        above = whole[: len(whole) - len(left)]
        found += run(store, left, batches, above)
        assert store.checkpoints.known() == [key]
    found += run(store, whole[2:], above=whole[:2])

    assert [bits(record, store) for record in found] == [bits(record, other) for record in expected]
    assert store.checkpoints.known() == []
    assert found[0].warnings == ()


def test_a_stage_whose_state_is_wrong_starts_anew(store: Store, tmp_path: Path) -> None:
    """The state has other names, as non-deterministic code may leave it."""
    (whole,), other = specs()[:1], Store(str(tmp_path / "other"))
    (expected,) = run(other, (whole,))
    run(store, (whole,), batches=4)
    found = store.checkpoints.latest(whole.key)
    assert found is not None
    values = dict(found.values)
    text = json.dumps(values["state"]["model"])
    assert '["fc1.weight", ' in text
    values["state"] = {**values["state"], "model": json.loads(text.replace('["fc1.weight", ', '["other", '))}
    tensors = found.tensors.read_bytes()
    store.checkpoints.save(whole.key, found.step, values, lambda file: file.write(tensors))

    (record,) = run(store, (whole,))
    assert bits(record, store) == bits(expected, other)
    assert "it started from the beginning: " in record.warnings[0]


def test_a_record_says_that_its_checkpoint_was_damaged(store: Store, tmp_path: Path) -> None:
    (whole,) = specs()[:1]
    run(store, (whole,), batches=4)
    (tensors,) = (tmp_path / "store" / "checkpoints").rglob("*.safetensors")
    tensors.write_bytes(b"half")

    (record,) = run(store, (whole,))
    assert record.warnings[0].startswith(
        f"its checkpoint was set aside, and it started from the beginning: {tensors.name} has 4 byt"
    )


def test_a_state_that_began_from_other_weights_is_not_gone_on_from(store: Store) -> None:
    clock = Clock()
    Checkpointing(store.checkpoints, KEY, started_from="one", minutes=1, grace=1, clock=clock).keep(
        lambda: TrainState.of({"step": 1, "w": torch.ones(2)}), ending=True
    )
    same = Checkpointing(store.checkpoints, KEY, started_from="one", minutes=1)
    state = same.latest()
    assert state is not None
    assert torch.equal(state.part("w"), torch.ones(2))
    other = Checkpointing(store.checkpoints, KEY, started_from="another", minutes=1)
    assert other.latest() is None
    assert "other weights" in other.warnings[0]
    assert same.latest() is None


def test_a_state_that_was_trained_on_other_data_is_not_gone_on_from_on_an_equal_machine(store: Store) -> None:
    def at(data: str, processor: str) -> Checkpointing:
        circumstances = {"processor": processor}
        return Checkpointing(store.checkpoints, KEY, data=data, minutes=1, grace=1, environment=circumstances)

    at("one", "a").keep(lambda: TrainState.of({"step": 1}), ending=True)

    assert at("one", "a").latest() is not None
    assert at("another", "b").latest() is not None, "another processor may compute other bits of the same data"
    other = at("another", "a")
    assert other.latest() is None
    assert "other data" in other.warnings[0]


def test_another_processor_is_told(store: Store) -> None:
    for processor in ("a", "b"):
        checkpoints = Checkpointing(
            store.checkpoints, KEY, minutes=1, grace=1, environment={"processor": processor, "host": processor}
        )
        checkpoints.latest()
        checkpoints.keep(lambda: TrainState.of({"step": 1}), ending=True)
    assert "'processor': 'a'" in checkpoints.warnings[0]


def test_a_stage_that_takes_too_long_goes_on_in_the_next_attempt(store: Store, tmp_path: Path) -> None:
    (spec,), other = specs()[:1], Store(str(tmp_path / "other"))
    (expected,) = run(other, (spec,))
    order, attempts = WorkOrder((spec,), Worker(store, grace=5, stage_timeout=1e-9)), 0
    while not store.finished([spec.key]):
        before = store.checkpoints.reached(spec.key).number
        attempts += 1
        with suppress(TimeoutError):
            list(run_segment(order.done_by(stage_timeout=1e-9 if attempts < 3 else None)))
        assert before <= store.checkpoints.reached(spec.key).number or attempts == 3

    assert attempts == 3
    assert bits(store.finished([spec.key])[spec.key], store) == bits(expected, other)


def test_the_start_of_a_training_is_a_stage_that_the_whole_may_go_on_from(store: Store, tmp_path: Path) -> None:
    """The start never reads its test split; the whole has the same key and record with a start and without."""
    (dense,), other = chain()[:1], Store(str(tmp_path / "other"))
    (expected,) = run(other, (dense,))
    start, nothing = start_of(dense, 4), start_of(dense, 0)
    begun, initialised = run(store, (start,)) + run(store, (nothing,))
    assert (begun.steps, initialised.steps) == (4, 0)
    assert not [name for name in {**begun.after, **initialised.after} if name.startswith("test/")]
    assert len({dense.key, start.key, nothing.key}) == 3
    steps = list[int]()
    train = training_loop._LoopRun.train

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(training_loop._LoopRun, "train", lambda run, *hooks: (steps.append(run.step), train(run, *hooks)))
        (record,) = run(store, (replace(dense, starts_from=(nothing.key, start.key)),))
    assert steps == [4]
    assert bits(record, store) == bits(expected, other)
