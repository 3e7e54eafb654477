"""Splits of a data set and their batches: tensors on the device, or a DataLoader; shares of a batch by process."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset, default_collate

from orchestrator.core.seeding import derive, seeded
from orchestrator.workloads.tasks.batch import moved, transformed

Items = TypeVar("Items", Tensor, list[Any])


class Part(NamedTuple):
    """A process's share of a batch."""

    batch: Any
    counts: bool
    """Whether the batch holds examples of the share; otherwise one example stands in, so that every process takes the
    same steps."""


@dataclass(frozen=True)
class Share:
    """Share of process `rank` of `size`: of n examples, each process has n // size, and the first n % size one more."""

    rank: int
    size: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return the first example of the share in a batch of `length`, and the one after its last."""
        least, more = divmod(length, self.size)
        begin = self.rank * least + min(self.rank, more)
        return begin, begin + least + (self.rank < more)

    def of(self, items: Items) -> Items:
        """Return the share of some items; the first item stands in for an empty share."""
        begin, end = self.bounds(len(items))
        return items[begin:end] if end > begin else items[:1]

    def counts(self, length: int) -> bool:
        """Whether the share of a batch of `length` has an example."""
        begin, end = self.bounds(length)
        return end > begin


Batch = Any
"""Collated examples of a Dataset, on the device; (inputs, labels) for a split held in memory."""


class Batches(Protocol):
    """Batches of each epoch; iterating yields the first epoch.

    `len` is the number of batches per epoch; a stream has it only in training.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Yield the batches of epoch `number` (from 0), from batch `start` on; the same in every call and process."""
        ...


class Split(Protocol):
    """Train, validation or test split."""

    def __len__(self) -> int:
        """Return the number of examples; a stream raises TypeError."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        drop_last: bool = False,
        share: Share | None = None,
    ) -> Batches:
        """Return batches on `device`; `seed` draws a new order for each epoch, None keeps the stored order.

        With `share`, each batch is a `Part`: the share of one of several processes.
        """
        ...


@dataclass(frozen=True)
class Reading:
    """How a split is read: the arguments of `Split.batches`."""

    size: int
    device: torch.device
    seed: int | None
    drop_last: bool
    share: Share | None

    def until(self, length: int) -> int:
        """Return the number of examples of an epoch that are read, of `length`."""
        return length // self.size * self.size if self.drop_last else length


class ReadSplit(ABC):
    """Base of splits."""

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        drop_last: bool = False,
        share: Share | None = None,
    ) -> Batches:
        """Return batches on `device`; `seed` draws a new order for each epoch, None keeps the stored order."""
        return self.read(Reading(batch_size, device, seed, drop_last, share))

    @abstractmethod
    def read(self, how: Reading) -> Batches:
        """Return the batches."""


@dataclass(frozen=True)
class TensorSplit(ReadSplit):
    """Split held in memory; all trials of a process share its tensors, so they must not be modified.

    `images` has shape (stored examples, ...) and `labels` (stored examples,); they may be mapped from a file that other
    processes map, too. 8-bit pixels take a quarter of the memory and give the same bits: `normalise` converts a batch
    of them to float32 inputs, example by example. The split consists of the stored examples `rows`, or of all if None.
    """

    images: Tensor
    labels: Tensor
    normalise: Callable[[Tensor], Tensor] | None = None
    rows: Tensor | None = None
    in_order: bool = False
    """Whether examples are consecutive, as blocks of a text are; a part is then cut from the end."""
    _resident: dict[torch.device, TensorSplit] = field(default_factory=dict, repr=False, compare=False)

    def __len__(self) -> int:
        return len(self.labels if self.rows is None else self.rows)

    @property
    def device(self) -> torch.device:
        """Device of the examples."""
        return self.images.device

    def to(self, device: torch.device) -> TensorSplit:
        """Return this split on `device`; a copy on another device is normalised once, when it is made."""
        if self.device == device:
            return self
        if device not in self._resident:
            self._resident.clear()
            images, labels = self.take(torch.arange(len(self), device=self.device))
            self._resident[device] = TensorSplit(images.to(device), labels.to(device))
        return self._resident[device]

    def leave_device(self) -> None:
        """Release the copy on a device."""
        self._resident.clear()

    def take(self, chosen: Tensor) -> Batch:
        """Return a batch of the `chosen` examples (int64 indices, on the device of this split)."""
        stored = chosen if self.rows is None else self.rows.index_select(0, chosen)
        images, labels = self.images.index_select(0, stored), self.labels.index_select(0, stored)
        labels = labels if labels.is_floating_point() else labels.long()
        return (images if self.normalise is None else self.normalise(images)), labels

    def subset(self, rows: Tensor) -> TensorSplit:
        """Return a split with these examples only; pixels are shared."""
        if self.normalise is None:
            return TensorSplit(*self.take(rows))
        return replace(self, rows=rows if self.rows is None else self.rows[rows], _resident={})

    def read(self, how: Reading) -> Batches:
        """Return batches of the examples held in memory."""
        return _TensorBatches(self.to(how.device), how)


@dataclass(frozen=True)
class LoaderSplit(ReadSplit):
    """Split read example by example from a Dataset, for data that do not fit in memory or are augmented."""

    dataset: Dataset[Any]
    num_workers: int = 0
    transform: Callable[[Any], Any] | None = None
    """Applied when an example is read: to the inputs of a tuple or list, else to the whole example."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch from examples; None is torch's `default_collate`."""
    _eval_loader: dict[Any, _LoaderBatches] = field(default_factory=dict, repr=False, compare=False)
    """Loader of the evaluations, reused so that its worker processes live on."""

    def __len__(self) -> int:
        return _length(self.dataset)

    def draws(self) -> bool:
        """Return whether the Dataset uses a global generator of Python, NumPy or torch when it reads an example."""
        states = []
        for read in (lambda: None, lambda: self.dataset[0]):
            with seeded(0):
                read()
                states.append((random.random(), np.random.random(), torch.rand(()).item()))  # noqa: NPY002
        return states[0] != states[1]

    def subset(self, rows: Tensor) -> LoaderSplit:
        """Return a split with these examples only."""
        return replace(self, dataset=Subset(self.dataset, rows.tolist()), _eval_loader={})

    def example(self) -> Any:
        """Return the first example without transform."""
        return self.dataset[0]

    def alone(self, count: int) -> list[Batch]:
        """Return up to `count` evenly spaced examples, starting with the first, each as a batch."""
        count = min(count, len(self))
        indices = (number * len(self) // count for number in range(count))
        examples = (transformed(self.dataset[index], self.transform) for index in indices)
        return [(self.collate or default_collate)([example]) for example in examples]

    def read(self, how: Reading) -> Batches:
        """Return batches of a loader.

        The Dataset's draws from global generators depend only on `seed`, the epoch and the batch, not on the process
        that reads it. Worker processes live through all epochs.
        """
        if how.seed is not None or not self.num_workers:
            return _LoaderBatches(self, how)
        if how not in self._eval_loader:
            self._eval_loader.clear()
            self._eval_loader[how] = _LoaderBatches(self, how)
        return self._eval_loader[how]


def _length(dataset: Dataset[Any]) -> int:
    assert isinstance(dataset, Sized)  # `data.load` refuses a Dataset without a length
    return len(dataset)


def index_of(batches: Batches, epoch: int, number: int, row: int) -> int | None:
    """Return the index in the split of a row of batch `number` in an epoch; None if examples have no index."""
    reads = batches.reads if isinstance(batches, _LoaderBatches) else batches
    if isinstance(reads, _TensorBatches | _BatchSampler):
        return int(reads.orders.of(epoch)[number * reads.size + row])
    return None


class _Orders:
    """Order of the examples in each epoch: permutations drawn one after another from a generator, or stored order."""

    def __init__(self, length: int, seed: int | None) -> None:
        self.length, self.seed = length, seed
        self._drawn = 0
        self._generator = torch.Generator()

    def of(self, epoch: int) -> Tensor:
        """Return the indices in the order of an epoch (int64, on the CPU, so that all devices get the same order)."""
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
    def __init__(self, split: TensorSplit, how: Reading) -> None:
        self.split, self.share, self.size = split, how.share, how.size
        self.orders, self.stop = _Orders(len(split), how.seed), how.until(len(split))

    def __len__(self) -> int:
        return -(-self.stop // self.size)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        order = self.orders.of(number).to(self.split.device)
        if start < len(self):  # torch.split of an empty tensor yields an empty batch
            yield from map(self._taken, torch.split(order[start * self.size : self.stop], self.size))

    def _taken(self, chosen: Tensor) -> Batch | Part:
        if self.share is None:
            return self.split.take(chosen)
        return Part(self.split.take(self.share.of(chosen)), self.share.counts(len(chosen)))


class _LoaderBatches:
    def __init__(self, split: LoaderSplit, how: Reading) -> None:
        self.device, self.share = how.device, how.share
        self.reads = _BatchSampler(len(split), how)
        self.loader: DataLoader[Any] = DataLoader(
            _Seeded(split.dataset, how.seed or 0, split.transform),
            batch_sampler=self.reads,
            collate_fn=split.collate,
            generator=torch.Generator(),  # the default is the global generator
            num_workers=split.num_workers,
            persistent_workers=split.num_workers > 0,
            pin_memory=how.device.type == "cuda",
        )

    def __len__(self) -> int:
        return len(self.reads)

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        self.reads.epoch, self.reads.start = number, start
        for place, batch in enumerate(self.loader, start):
            held = moved(batch, self.device)
            yield held if self.share is None else Part(held, self.share.counts(self.reads.length(place)))


@dataclass(frozen=True)
class _BatchRead:
    """Examples of one batch and its place, which decides with the seed what the examples draw."""

    place: str
    indices: list[int]


class _BatchSampler(Sampler[Any]):
    """Sampler of the batches of `epoch`, from batch `start` on."""

    def __init__(self, length: int, how: Reading) -> None:
        self.orders, self.size, self.share = _Orders(length, how.seed), how.size, how.share
        self.stop = how.until(length)
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return -(-self.stop // self.size)

    def __iter__(self) -> Iterator[Any]:
        order, epoch = self.orders.of(self.epoch)[: self.stop].tolist(), self.epoch
        for number in range(self.start, len(self)):
            place, indices = f"{epoch}/{number}", order[number * self.size : (number + 1) * self.size]
            if self.share is not None:
                place, indices = f"{place}/{self.share.rank}", self.share.of(indices)
            yield _BatchRead(place, indices)

    def length(self, number: int) -> int:
        """Return the number of examples in a whole batch."""
        return min(self.size, self.stop - number * self.size)


class _Seeded(Dataset[Any]):
    """Dataset that seeds the global generators before it reads each batch, in whichever process."""

    def __init__(self, dataset: Dataset[Any], seed: int, transform: Callable[[Any], Any] | None) -> None:
        self.dataset, self.seed, self.transform = dataset, seed, transform

    def __getitems__(self, read: _BatchRead) -> list[Any]:
        with seeded(derive(self.seed, read.place)):
            if together := getattr(self.dataset, "__getitems__", None):
                found = list(together(read.indices))
            else:
                found = [self.dataset[index] for index in read.indices]
            return [transformed(example, self.transform) for example in found]
