"""A split read from a stream: examples that come one after another, with no index and no number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from orchestrator.core.errors import DataError
from orchestrator.core.seeding import derive, seeded
from orchestrator.workloads.splits import Batch, Batches
from orchestrator.workloads.tasks.batch import moved, transformed


@dataclass(frozen=True)
class StreamSplit:
    """A split read from an IterableDataset of the user's: so many batches an epoch to train, to its end to evaluate."""

    dataset: IterableDataset[Any]
    steps: int | None = None
    """Batches of an epoch, for which a stream that ends begins anew; None reads it to its end."""
    num_workers: int = 0
    """Loader workers in training; each reads the share that the stream gives it. To its end it is read by one at most:
    where a stream gives every worker all of it, examples would count twice."""
    transform: Callable[[Any], Any] | None = None
    """What is done to an example as it is read: to the inputs of a pair, to all of another."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of examples; None is torch's `default_collate`."""
    _kept: dict[Any, _StreamBatches] = field(default_factory=dict, repr=False, compare=False)
    """The loader of the evaluations so far: its worker process serves the next, too."""

    def __len__(self) -> int:
        raise TypeError("a stream has no length: how many examples it has is not known before it is read")

    def examples(self) -> Iterator[Any]:
        """Return the examples of the first epoch, as they are stored."""
        return _begun(self.dataset, 0)

    def example(self) -> Any:
        """Return the first example as it is stored."""
        return next(self.examples())

    def empty(self) -> bool:
        """Whether there is no example."""
        with seeded(0):
            return not list(islice(self.examples(), 1))

    def in_steps(self, steps: Any, target: str) -> StreamSplit:
        """Return this split with `steps` batches an epoch; `target` is what returned it.

        Raises:
            DataError: `steps` is no positive integer.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise DataError(
                f"`data.steps_per_epoch` (={'null' if steps is None else steps}) must be a positive number of batches "
                f"where {target} returns a stream to train on; pass one, or return it beside `train`."
            )
        return replace(self, steps=steps)

    def alone(self, count: int) -> list[Batch]:
        """Return the first `count` examples, each as a batch."""
        chosen = (transformed(example, self.transform) for example in islice(self.examples(), count))
        return [(self.collate or default_collate)([example]) for example in chosen]

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        seed: int | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`, in the order of the stream.

        An epoch begins the stream anew and tells it the epoch's number, by `set_epoch` where it has that. What it draws
        from global generators follows from `seed`, the epoch and the batch, in whichever process it is read.
        Every batch of a training is full, whatever `drop_last` says.
        """
        del drop_last
        if self.steps is not None:
            return _StreamBatches(self, batch_size, device, seed or 0)
        asked = batch_size, device, seed
        if asked not in self._kept:
            self._kept.clear()
            self._kept[asked] = _StreamBatches(self, batch_size, device, seed or 0)
        return self._kept[asked]


class _StreamBatches:
    def __init__(self, split: StreamSplit, size: int, device: torch.device, seed: int) -> None:
        self.device = device
        workers = split.num_workers if split.steps is not None else min(split.num_workers, 1)
        self.reads = _Reads(split.steps, max(workers, 1))
        self.loader: DataLoader[Any] = DataLoader(
            _Share(split, size, seed, self.reads.shares),
            batch_size=None,
            sampler=self.reads,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # or else it draws from the global one
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=device.type == "cuda",
        )

    def __len__(self) -> int:
        if self.reads.steps is None:
            raise TypeError("the batches of a stream have no number before it is read to its end")
        return self.reads.steps

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        self.reads.epoch, self.reads.start = number, start
        for batch in islice(self.loader, start % self.reads.shares, None):
            if isinstance(batch, DataError):
                try:
                    raise batch
                finally:
                    del batch  # or the error holds itself, and with it the loader's processes
            if batch is None:
                return
            yield moved(batch, self.device)


@dataclass(frozen=True)
class _Read:
    """A batch to be read: its epoch and number, and in which pass through the loader that is."""

    turn: int
    epoch: int
    number: int


class _Reads(Sampler[_Read]):
    """The batches of `epoch` from `start` on; the loader deals them to its workers in turn, from the first worker on.

    They begin with a batch of the first worker: those before `start` are to be left out.
    """

    def __init__(self, steps: int | None, shares: int) -> None:
        self.steps, self.shares = steps, shares
        self.turn = self.epoch = self.start = 0

    def __iter__(self) -> Iterator[_Read]:
        self.turn += 1
        turn, epoch, first = self.turn, self.epoch, self.start - self.start % self.shares
        for number in count(first) if self.steps is None else range(first, self.steps):
            yield _Read(turn, epoch, number)


class _Share(Dataset[Any]):
    """What one process reads of a stream: every `shares`th batch, in order, each with the generators seeded for it."""

    def __init__(self, split: StreamSplit, size: int, seed: int, shares: int) -> None:
        self.stream, self.transform, self.collate = split.dataset, split.transform, split.collate or default_collate
        self.size, self.seed, self.shares, self.repeats = size, seed, shares, split.steps is not None
        self._turn = self._next = 0
        self._examples: Iterator[Any] | None = None

    def __getitem__(self, read: _Read) -> Any:
        """Return a batch, having read what comes before it; None where the stream has ended; or why there is none."""
        if read.turn != self._turn:
            self._turn, self._next, self._examples = read.turn, read.number % self.shares, None
        for number in range(self._next, read.number, self.shares):
            with seeded(derive(self.seed, f"{read.epoch}/{number}")):
                self._read(read.epoch)
        self._next = read.number + self.shares
        with seeded(derive(self.seed, f"{read.epoch}/{read.number}")):
            examples = self._read(read.epoch)
            if examples:
                return self.collate([transformed(example, self.transform) for example in examples])
        return self._nothing(read.number % self.shares) if self.repeats else None

    def _read(self, epoch: int) -> list[Any]:
        """Return the next examples: a whole batch, or what is left of a stream that is read to its end."""
        found: list[Any] = []
        while len(found) < self.size:
            anew = self._examples is None
            if self._examples is None:
                self._examples = _begun(self.stream, epoch)
            more = list(islice(self._examples, self.size - len(found)))
            found += more
            if not self.repeats or (anew and not more):
                break
            if len(found) < self.size:
                self._examples = None
        return found

    def _nothing(self, share: int) -> DataError:
        if self.shares == 1:
            return DataError("`data`: the train split is a stream that gives no example; let it give some.")
        return DataError(
            f"`data.num_workers` (={self.shares}) must be at most the shares that the stream of the train split has, "
            f"and worker {share + 1} was given no example; pass a smaller number, or 0."
        )


def _begun(stream: IterableDataset[Any], epoch: int) -> Iterator[Any]:
    if callable(told := getattr(stream, "set_epoch", None)):
        told(epoch)
    return iter(stream)


def _as_it_is(batch: Any) -> Any:
    return batch
