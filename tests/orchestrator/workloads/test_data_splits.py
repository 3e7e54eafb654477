"""Batches of splits: every example once an epoch, a new order each epoch, equal from tensors and from a loader."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from sampling import sampled
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from orchestrator.workloads.splits import LoaderSplit, Share, Split, TensorSplit
from orchestrator.workloads.streamed_splits import StreamSplit

CPU = torch.device("cpu")
N = 11
X, Y = torch.arange(N, dtype=torch.float32).view(N, 1), torch.arange(N)


class Augmented(Dataset[tuple[Tensor, int]]):
    """Dataset that adds noise from every global generator."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(1) + random.random() + np.random.rand(), index  # noqa: NPY002


class Ordered(IterableDataset[tuple[Tensor, int]]):
    """Stream of all examples."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        yield from zip(X, Y.tolist(), strict=True)


PIXELS = Y.to(torch.uint8).view(N, 1, 1, 1)
KINDS = ["tensors", "pixels", "loader"]


def splits() -> list[Split]:
    return [TensorSplit(X, Y), TensorSplit(PIXELS, Y, Tensor.float), LoaderSplit(TensorDataset(X, Y))]


def epochs(split: Split, count: int = 2, seed: int | None = 3, **options: Any) -> list[list[list[int]]]:
    batches = split.batches(4, device=CPU, seed=seed, **options)
    found = []
    for number in range(count):
        epoch = list(batches.epoch(number))
        assert len(epoch) == len(batches)
        assert all(torch.equal(x.flatten().long(), y) for x, y in epoch)
        found.append([y.tolist() for _, y in epoch])
    return found


def shared(split: Split, ranks: int) -> list[int]:
    """Return the examples of an evaluation by several processes, batch by batch."""
    parts = [split.batches(4, device=CPU, share=Share(rank, ranks)).epoch(0) for rank in range(ranks)]
    return [
        example
        for batch in zip(*map(list, parts), strict=True)
        for part in batch
        if part.counts
        for example in part.batch[1].tolist()
    ]


@pytest.mark.parametrize("split", splits(), ids=KINDS)
def test_an_epoch_has_every_example_once_in_an_order_of_its_own(split: Split) -> None:
    first, second = epochs(split)

    assert [len(batch) for batch in first] == [4, 4, 3]
    for epoch in (first, second):
        assert sorted(chain.from_iterable(epoch)) == list(range(N))
    assert first != second
    assert epochs(split) == [first, second]
    assert epochs(split, seed=4) != [first, second]


@pytest.mark.parametrize("split", splits(), ids=KINDS)
def test_without_a_seed_the_order_is_the_stored_one(split: Split) -> None:
    assert epochs(split, count=1, seed=None) == [[[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]]


@pytest.mark.parametrize("split", splits(), ids=KINDS)
def test_the_last_small_batch_may_be_dropped(split: Split) -> None:
    assert [len(batch) for batch in epochs(split, count=1, drop_last=True)[0]] == [4, 4]


@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("split", splits(), ids=KINDS)
def test_the_shares_of_several_processes_are_the_split(split: Split, ranks: int) -> None:
    assert shared(split, ranks) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10], "the last batch has 3 examples"


@sampled(2)
@pytest.mark.parametrize(
    "split", [LoaderSplit(TensorDataset(X, Y), 1), StreamSplit(Ordered())], ids=["loader", "stream"]
)
def test_evaluations_that_reuse_a_loader_divide_too(split: Split) -> None:
    whole = [y.tolist() for _, y in split.batches(4, device=CPU)]

    assert shared(split, 5) == [*chain.from_iterable(whole)] == [*range(N)]


def test_every_kind_has_the_same_order() -> None:
    first, *others = (epochs(split, count=3) for split in splits())

    assert all(other == first for other in others)


@pytest.mark.parametrize("split", splits(), ids=KINDS)
def test_a_subset_has_the_examples_of_its_rows(split: TensorSplit | LoaderSplit) -> None:
    first = split.subset(torch.tensor([8, 1, 3, 5]))
    second = first.subset(torch.tensor([3, 0]))

    assert epochs(first, count=1, seed=None) == [[[8, 1, 3, 5]]]
    assert (len(second), epochs(second, count=1, seed=None)) == (2, [[[5, 8]]])
    assert len(split) == N


@pytest.mark.slow
def test_worker_processes_change_no_order_and_draw_from_the_seed() -> None:
    assert epochs(LoaderSplit(TensorDataset(X, Y), num_workers=2)) == epochs(LoaderSplit(TensorDataset(X, Y)))

    noise: list[list[float]] = []
    for seed in (1, 1, 2):
        torch.manual_seed(len(noise))
        batches = LoaderSplit(Augmented(), 2).batches(4, device=CPU, seed=seed)
        noise.append(torch.cat([x for epoch in range(2) for x, _ in batches.epoch(epoch)]).flatten().tolist())
    assert noise[0] == noise[1]
    assert set(noise[0]).isdisjoint(noise[2])


@pytest.mark.parametrize("split", [*splits(), LoaderSplit(Augmented()), LoaderSplit(Augmented(), 2)])
def test_an_epoch_goes_on_from_any_batch_in_another_process(split: Split) -> None:
    """Draws depend on the seed, the epoch and the batch, not on earlier draws or on the process."""
    whole = split.batches(4, device=CPU, seed=3)
    epochs = [list(whole.epoch(number)) for number in range(3)]
    alone = LoaderSplit(split.dataset) if isinstance(split, LoaderSplit) else split

    for epoch, start in ((2, 1), (0, 2), (1, 0), (1, 3)):
        rest = list(alone.batches(4, device=CPU, seed=3).epoch(epoch, start))
        assert len(rest) == 3 - start
        assert all(
            torch.equal(a, b)
            for one, other in zip(rest, epochs[epoch][start:], strict=True)
            for a, b in zip(one, other, strict=True)
        )


def test_a_loader_leaves_the_global_generator_alone() -> None:
    state = torch.get_rng_state()
    epochs(LoaderSplit(TensorDataset(X, Y)), seed=None)

    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("split", splits(), ids=KINDS)
def test_writing_to_a_batch_leaves_the_split_as_it_was(split: Split) -> None:
    for images, _ in split.batches(4, device=CPU):
        images.zero_()

    assert epochs(split, count=1, seed=None)[0][0] == [0, 1, 2, 3]


@pytest.mark.parametrize("split", splits()[:2], ids=KINDS[:2])
def test_a_split_is_copied_to_a_device_once(split: TensorSplit) -> None:
    meta = torch.device("meta")

    assert split.to(CPU) is split
    assert split.to(meta) is split.to(meta)
    assert split.to(meta).device == meta
    assert split.to(meta).subset(torch.arange(3, device=meta)).device == meta


@pytest.mark.parametrize("split", splits()[:2], ids=KINDS[:2])
def test_a_copy_lasts_until_the_split_leaves_the_device(split: TensorSplit) -> None:
    meta = torch.device("meta")
    before = split.to(meta)
    split.leave_device()
    again = split.to(meta)

    assert again is not before
    split.to(torch.device("meta", 1))
    assert split.to(meta) is not again, "only one device holds a copy at a time"


def test_a_dataset_that_augments_is_known_by_what_it_draws() -> None:
    assert LoaderSplit(Augmented()).draws()
    assert not LoaderSplit(TensorDataset(X, Y)).draws()


def test_pixels_on_another_device_are_normalised_there_already() -> None:
    part = TensorSplit(PIXELS, Y, Tensor.float).subset(torch.tensor([2, 7]))
    moved = part.to(torch.device("meta"))

    assert isinstance(moved, TensorSplit)
    assert (moved.images.shape, moved.images.dtype) == ((2, 1, 1, 1), torch.float32)
