"""Streamed splits: a fixed number of batches an epoch, decided by seed and epoch; evaluations read to the end."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from itertools import islice
from multiprocessing import active_children
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from orchestrator.core.errors import DataError
from orchestrator.training.preflight.rehearsal import _FewExamples
from orchestrator.workloads import data_loading
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import Split
from orchestrator.workloads.streamed_splits import StreamSplit

HERE, CPU, N = __name__, torch.device("cpu"), 10


class Count(IterableDataset[tuple[Tensor, int]]):
    """Stream of the numbers below `n`, each with a random draw; each loader worker gets a share."""

    def __init__(self, n: int = N, draws: bool = False) -> None:
        self.n, self.draws, self.epoch = n, draws, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        worker = get_worker_info()
        for number in range(worker.id if worker else 0, self.n, worker.num_workers if worker else 1):
            drawn = random.random() + float(torch.rand(())) if self.draws else 0.0
            yield torch.tensor([number + 100.0 * self.epoch, drawn]), number % 2


class Words(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield "text", 0


def flipped(inputs: Tensor) -> Tensor:
    return -inputs


def streams(**changes: Any) -> dict[str, Any]:
    pair = (torch.arange(6.0).view(3, 2), torch.arange(3))
    without = changes.pop("without", None)
    named = {"train": Count(), "val": Count(), "test": pair, "classes": 2, "steps_per_epoch": 4} | {
        key: {"empty": Count(0), "words": Words(), "pair": pair, "flipped": flipped}[value]
        for key, value in changes.pop("named", {}).items()
    }
    return {key: value for key, value in named.items() if key != without}


def load(**config: Any) -> Data:
    return data_loading.load({"_target_": f"{HERE}.streams", **config})


def numbers(batches: Any) -> list[list[int]]:
    return [[int(value) for value in inputs[:, 0]] for inputs, _ in batches]


def read(split: Split, epoch: int, start: int = 0, seed: int = 1) -> list[Tensor]:
    return [inputs for inputs, _ in split.batches(3, device=CPU, seed=seed).epoch(epoch, start)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def test_an_epoch_has_the_batches_asked_for_and_a_stream_that_ends_begins_anew() -> None:
    batches = StreamSplit(Count(), steps=5).batches(4, device=CPU, seed=1)

    assert len(batches) == 5
    assert numbers(batches) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert numbers(batches.epoch(2))[:2] == [[200, 201, 202, 203], [204, 205, 206, 207]]
    assert numbers(StreamSplit(Count(1), steps=1).batches(3, device=CPU)) == [[0, 0, 0]]


@pytest.mark.parametrize("workers", [0, 2])
def test_what_a_stream_yields_follows_from_seed_and_epoch_wherever_it_is_begun(workers: int) -> None:
    split = StreamSplit(Count(draws=True), steps=7, num_workers=workers)
    batches = split.batches(3, device=CPU, seed=1)
    before = random.getstate(), torch.get_rng_state()
    first = [inputs for inputs, _ in batches.epoch(1)]
    next(iter(batches.epoch(0)))  # one batch only

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert same([inputs for inputs, _ in batches.epoch(1)], first)
    for start in (1, 4):
        assert same([inputs for inputs, _ in batches.epoch(1, start)], first[start:])
    assert same(read(split, 1, 5), first[5:])
    assert not same(read(split, 1, seed=2), first)
    assert len({float(drawn) for inputs in first for drawn in inputs[:, 1]}) == 21


def test_each_worker_reads_its_share() -> None:
    split = StreamSplit(Count(), steps=4, num_workers=2)

    assert numbers(split.batches(2, device=CPU)) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def test_an_evaluation_reads_to_the_end_and_the_next_gives_the_same() -> None:
    for workers in (0, 3):
        split = StreamSplit(Count(draws=True), num_workers=workers)
        batches = split.batches(4, device=CPU)
        first = [inputs for inputs, _ in batches]

        assert [len(inputs) for inputs in first] == [4, 4, 2]
        assert [int(value) for inputs in first for value in inputs[:, 0]] == list(range(N))
        assert same([inputs for inputs, _ in split.batches(4, device=CPU)], first)
        assert split.batches(4, device=CPU) is batches
        for unknown in (split, batches):
            with pytest.raises(TypeError, match="stream"):
                len(unknown)


def test_a_target_gives_streams() -> None:
    found = load()

    assert (found.input_shape, found.classes) == ((2,), 2)
    assert len(found.train.batches(2, device=CPU)) == 4
    assert len(list(found.val.batches(2, device=CPU))) == 5
    assert len(load(steps_per_epoch=6).train.batches(2, device=CPU)) == 6
    few = _FewExamples(found.train, "train", str).batches(512, device=CPU, seed=1)
    assert (len(few), numbers(few)) == (4, [[0, 1, 2, 3, 4, 5, 6, 7]])
    assert numbers(_FewExamples(found.val, "val", str).batches(512, device=CPU)) == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_training_examples_of_a_stream_alone_get_the_transform() -> None:
    found = load(named={"transform": "flipped"})

    assert numbers(found.train.batches(3, device=CPU))[0] == [0, -1, -2]
    assert numbers(found.val.batches(3, device=CPU))[0] == [0, 1, 2]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"without": "steps_per_epoch"}, ["data.steps_per_epoch", "=null", "positive number of batches", "streams"]),
        ({"steps_per_epoch": 0}, ["data.steps_per_epoch", "=0"]),
        ({"steps_per_epoch": 2.5}, ["data.steps_per_epoch", "=2.5"]),
        ({"without": "val"}, ["training stream", "no validation split can be cut", "`val`"]),
        ({"named": {"train": "pair"}}, ["data.steps_per_epoch", "=4", "must be null", "has a length"]),
        ({"named": {"train": "empty"}}, ["train split is empty"]),
        ({"named": {"val": "empty"}}, ["val split is empty"]),
        ({"named": {"train": "words"}}, ["(input tensor, label)", "(str, int)", "ToTensor"]),
        ({"without": "classes"}, ["number of classes is unknown"]),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        load(**config)

    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_more_workers_than_shares_are_told() -> None:
    split, before = StreamSplit(Count(1), steps=4, num_workers=2), active_children()

    gc.disable()  # a collection could come too late
    try:
        with pytest.raises(DataError, match=r"^`data\.num_workers` \(=2\) must be at most .* worker 2 .* no example"):
            list(islice(split.batches(1, device=CPU), 3))
        assert active_children() == before, "the loader's processes end with the error"
    finally:
        gc.enable()
