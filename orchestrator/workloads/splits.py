"""The three splits of a data set, and batches from them: tensors on the device, or a DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from orchestrator.core.seeding import derive, seeded
from orchestrator.workloads.tasks.batch import moved, transformed

Batch = Any
"""What a Dataset's examples are collated to, on the device; of a split held in memory (inputs, labels)."""


class Batches(Protocol):
    """The batches of an epoch, the first one's where it is iterated; `len` is their number, of a stream in training."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch `number` (from 0) from batch `start` on: the same ones wherever that is asked."""
        ...


class Split(Protocol):
    """A train, validation or test split."""

    def __len__(self) -> int:
        """Number of examples; a stream raises TypeError."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`: in the order of a new permutation that `seed` gives each epoch, or as stored."""
        ...


@dataclass(frozen=True)
class TensorSplit:
    """A split held in memory; every trial of a process shares these tensors, so nobody writes to them.

    `images` has shape (stored examples, ...) and `labels` (stored examples,); they may be mapped from a file that other
    processes map too. Images of 8-bit pixels take a quarter of the memory, to the same bits: `normalise` turns a batch
    of them to float32 inputs, each example by itself. The split has the examples `rows` of what is stored, all of them
    if None.
    """

    images: Tensor
    labels: Tensor
    normalise: Callable[[Tensor], Tensor] | None = None
    rows: Tensor | None = None
    in_order: bool = False
    """Whether examples follow each other, as blocks of a text do: then a part of it is cut from its end."""
    _resident: dict[torch.device, TensorSplit] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.labels if self.rows is None else self.rows)

    @property
    def device(self) -> torch.device:
        """Where the examples lie."""
        return self.images.device

    def to(self, device: torch.device) -> TensorSplit:
        """Return this split on `device`; on another than the CPU it is normalised once, as it is copied there."""
        if self.device == device:
            return self
        if device not in self._resident:
            self._resident.clear()
            images, labels = self.take(torch.arange(len(self), device=self.device))
            self._resident[device] = TensorSplit(images.to(device), labels.to(device))
        return self._resident[device]

    def leave_device(self) -> None:
        """Give up the copy on a device."""
        self._resident.clear()

    def take(self, chosen: Tensor) -> Batch:
        """Return a batch of the `chosen` examples (int64 indices, on the device of this split)."""
        stored = chosen if self.rows is None else self.rows.index_select(0, chosen)
        images, labels = self.images.index_select(0, stored), self.labels.index_select(0, stored)
        labels = labels if labels.is_floating_point() else labels.long()
        return (images if self.normalise is None else self.normalise(images)), labels

    def subset(self, rows: Tensor) -> TensorSplit:
        """Return a split of these examples only; pixels are shared."""
        if self.normalise is None:
            return TensorSplit(*self.take(rows))
        return replace(self, rows=rows if self.rows is None else self.rows[rows], _resident={})

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`: in the order of a new permutation that `seed` gives each epoch, or as stored."""
        return _TensorBatches(self.to(device), batch_size, _Orders(len(self), seed), drop_last)


@dataclass(frozen=True)
class LoaderSplit:
    """A split read example by example from a Dataset of the user's, for data that does not fit or is augmented."""

    dataset: Dataset[Any]
    num_workers: int = 0
    transform: Callable[[Any], Any] | None = None
    """What is done to an example as it is read: to the inputs of a pair, to all of another."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of examples; None is torch's `default_collate`."""
    _kept: dict[Any, _LoaderBatches] = field(default_factory=dict, repr=False, compare=False)
    """The loader of the evaluations so far: its worker processes serve the next, too."""

    def __len__(self) -> int:
        return _length(self.dataset)

    def draws(self) -> bool:
        """Whether the Dataset draws from a global generator of Python, NumPy or torch as it reads an example."""
        states = []
        for read in (lambda: None, lambda: self.dataset[0]):
            with seeded(0):
                read()
                states.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
        return states[0] != states[1]

    def subset(self, rows: Tensor) -> LoaderSplit:
        """Return a split of these examples only."""
        return replace(self, dataset=Subset(self.dataset, rows.tolist()), _kept={})

    def example(self) -> Any:
        """Return the first example as it is stored."""
        return self.dataset[0]

    def alone(self, count: int) -> list[Batch]:
        """Return up to `count` evenly spaced examples, the first one first, each as a batch."""
        count = min(count, len(self))
        indices = (number * len(self) // count for number in range(count))
        examples = (transformed(self.dataset[index], self.transform) for index in indices)
        return [(self.collate or default_collate)([example]) for example in examples]

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`: in the order of a new permutation that `seed` gives each epoch, or as stored.

        What the Dataset draws from global generators follows from `seed`, the epoch and the batch, in whichever process
        it is read. Worker processes, if any, live through all epochs.
        """
        if seed is not None or not self.num_workers:
            return _LoaderBatches(self, batch_size, device, _Orders(len(self), seed), drop_last)
        asked = batch_size, device, drop_last
        if asked not in self._kept:
            self._kept.clear()
            self._kept[asked] = _LoaderBatches(self, batch_size, device, _Orders(len(self), None), drop_last)
        return self._kept[asked]


def _length(dataset: Dataset[Any]) -> int:
    assert isinstance(dataset, Sized)  # `data.load` refuses a Dataset without a length
    return len(dataset)


def index_of(batches: Batches, epoch: int, number: int, row: int) -> int | None:
    """Return the index in its split of a row of batch `number` of an epoch; None where examples have no index."""
    reads = batches.reads if isinstance(batches, _LoaderBatches) else batches
    if isinstance(reads, _TensorBatches | _Reads):
        return int(reads.orders.of(epoch)[number * reads.size + row])
    return None


class _Orders:
    """The order of the examples in each epoch: permutations drawn from a generator one after another, or as stored."""

    def __init__(self, length: int, seed: int | None) -> None:
        self.length, self.seed = length, seed
        self._drawn = 0
        self._generator = torch.Generator()

    def of(self, epoch: int) -> Tensor:
        """Return the indices in the order of an epoch (int64, on the CPU, so that it is the same on every device)."""
        if self.seed is None:
            return torch.arange(self.length)
        if not 0 < self._drawn <= epoch:
            self._generator.manual_seed(self.seed)
            self._drawn = 0
        while self._drawn < epoch:
            self._draw()
        return self._draw()

    def _draw(self) -> Tensor:
        self._drawn += 1
        return torch.randperm(self.length, generator=self._generator)


class _TensorBatches:
    def __init__(self, split: TensorSplit, size: int, orders: _Orders, drop_last: bool) -> None:
        self.split = split
        self.size = size
        self.orders = orders
        self.stop = len(split) // size * size if drop_last else len(split)

    def __len__(self) -> int:
        return -(-self.stop // self.size)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        order = self.orders.of(number).to(self.split.device)
        if start < len(self):  # an empty tensor is split into one that is empty
            yield from map(self.split.take, torch.split(order[start * self.size : self.stop], self.size))


class _LoaderBatches:
    def __init__(self, split: LoaderSplit, size: int, device: torch.device, orders: _Orders, drop_last: bool) -> None:
        self.device = device
        self.reads = _Reads(orders, size, drop_last)
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(split.dataset, orders.seed or 0, split.transform),
            batch_sampler=self.reads,
            collate_fn=split.collate,
            generator=torch.Generator(),  # or else it draws from the global one
            num_workers=split.num_workers,
            persistent_workers=split.num_workers > 0,
            pin_memory=device.type == "cuda",
        )

    def __len__(self) -> int:
        return len(self.reads)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        self.reads.epoch, self.reads.start = number, start
        for batch in self.loader:
            yield moved(batch, self.device)


@dataclass(frozen=True)
class _Read:
    """The examples of one batch, and where it stands: what they draw follows from that and the seed."""

    place: str
    indices: list[int]


class _Reads(Sampler[Any]):
    """The batches of `epoch` from `start` on."""

    def __init__(self, orders: _Orders, size: int, drop_last: bool) -> None:
        self.orders, self.size = orders, size
        self.stop = orders.length // size * size if drop_last else orders.length
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return -(-self.stop // self.size)

    def __iter__(self) -> Iterator[Any]:
        order, epoch = self.orders.of(self.epoch)[: self.stop].tolist(), self.epoch
        for number in range(self.start, len(self)):
            yield _Read(f"{epoch}/{number}", order[number * self.size : (number + 1) * self.size])


class _Seeded(Dataset[Any]):
    """Reads the batches of a Dataset, each with the global generators seeded for it, in whichever process."""

    def __init__(self, dataset: Dataset[Any], seed: int, transform: Callable[[Any], Any] | None) -> None:
        self.dataset, self.seed, self.transform = dataset, seed, transform

    def __getitems__(self, read: _Read) -> list[Any]:
        with seeded(derive(self.seed, read.place)):
            if together := getattr(self.dataset, "__getitems__", None):
                found = list(together(read.indices))
            else:
                found = [self.dataset[index] for index in read.indices]
            return [transformed(example, self.transform) for example in found]
