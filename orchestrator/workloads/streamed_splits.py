"""Split read from a stream, whose examples come one after another, without index and without known number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, default_collate

from orchestrator.core.errors import DataError
from orchestrator.core.seeding import derive, seeded
from orchestrator.workloads.splits import Batch, Batches, Part, Reading, ReadSplit, Share
from orchestrator.workloads.tasks.batch import moved, transformed


@dataclass(frozen=True)
class StreamSplit(ReadSplit):
    """Split read from an IterableDataset: `steps` batches per epoch in training, all examples in evaluation."""

    dataset: IterableDataset[Any]
    steps: int | None = None
    """Batches per epoch; a stream that ends starts again. None reads the stream once to its end."""
    num_workers: int = 0
    """Loader workers in training; each reads the share that the stream gives it.

    At most one worker reads a stream to its end: if the stream gave all examples to every worker, they would count
    twice.
    """
    transform: Callable[[Any], Any] | None = None
    """Applied when an example is read: to the inputs of a tuple or list, else to the whole example."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch from examples; None is torch's `default_collate`."""
    _eval_loader: dict[Any, _StreamBatches] = field(default_factory=dict, repr=False, compare=False)
    """Loader of the evaluations, reused so that its worker process lives on."""

    def __len__(self) -> int:
        raise TypeError("a stream has no length, because its number of examples is unknown before it is read")

    def examples(self) -> Iterator[Any]:
        """Return the examples of the first epoch, without transform."""
        return _start(self.dataset, 0)

    def example(self) -> Any:
        """Return the first example, without transform."""
        return next(self.examples())

    def empty(self) -> bool:
        """Return whether the stream has no examples."""
        with seeded(0):
            return not list(islice(self.examples(), 1))

    def in_steps(self, steps: Any, target: str) -> StreamSplit:
        """Return this split with `steps` batches per epoch.

        Args:
            steps: the number of batches, to be checked.
            target: the target that returned the stream, for the error.

        Raises:
            DataError: `steps` is not a positive integer.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise DataError(
                f"`data.steps_per_epoch` (={'null' if steps is None else steps}) must be a positive number of batches, "
                f"because {target} returns a training stream; pass a number, or return it beside `train`."
            )
        return replace(self, steps=steps)

    def alone(self, count: int) -> list[Batch]:
        """Return the first `count` examples, each as a batch."""
        chosen = (transformed(example, self.transform) for example in islice(self.examples(), count))
        return [(self.collate or default_collate)([example]) for example in chosen]

    def read(self, how: Reading) -> Batches:
        """Return batches in the order of the stream.

        Each epoch starts the stream again and passes the epoch's number to its `set_epoch`, if it has that method. The
        stream's draws from global generators depend only on `seed`, the epoch and the batch, not on the process that
        reads it. Every batch of a training is full, whatever `drop_last` says.
        """
        if self.steps is not None:
            return _StreamBatches(self, how)
        how = replace(how, drop_last=False)
        if how not in self._eval_loader:
            self._eval_loader.clear()
            self._eval_loader[how] = _StreamBatches(self, how)
        return self._eval_loader[how]


class _StreamBatches:
    def __init__(self, split: StreamSplit, how: Reading) -> None:
        self.device, self.share, self.size = how.device, how.share, how.size
        workers = split.num_workers if split.steps is not None else min(split.num_workers, 1)
        self.reads = _StreamSampler(split.steps, max(workers, 1))
        self.loader: DataLoader[Any] = DataLoader(
            _WorkersPart(split, how.size, how.seed or 0, self.reads.shares, how.share),
            batch_size=None,
            sampler=self.reads,
            collate_fn=_identity,
            generator=torch.Generator(),  # the default is the global generator
            num_workers=workers,
            persistent_workers=workers > 0,
            pin_memory=how.device.type == "cuda",
        )

    def __len__(self) -> int:
        if self.reads.steps is None:
            raise TypeError("the number of batches in a stream is unknown before it is read to its end")
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
                    del batch  # breaks a reference cycle that would keep the loader's processes alive
            if batch is None:
                return
            yield Part(moved(batch.batch, self.device), batch.counts) if self.share else moved(batch, self.device)


@dataclass(frozen=True)
class _StreamRead:
    """Batch to read: its pass through the loader, its epoch and its number."""

    turn: int
    epoch: int
    number: int


class _StreamSampler(Sampler[_StreamRead]):
    """Sampler of the batches of `epoch` from batch `start` on; the loader deals them to its workers in turn.

    The first sampled batch belongs to the first worker, so it may come before `start`; the caller skips the batches
    before `start`.
    """

    def __init__(self, steps: int | None, shares: int) -> None:
        self.steps, self.shares = steps, shares
        self.turn = self.epoch = self.start = 0

    def __iter__(self) -> Iterator[_StreamRead]:
        self.turn += 1
        turn, epoch, first = self.turn, self.epoch, self.start - self.start % self.shares
        for number in count(first) if self.steps is None else range(first, self.steps):
            yield _StreamRead(turn, epoch, number)


class _WorkersPart(Dataset[Any]):
    """Part of a stream that a loader's worker reads: every `shares`th batch, with generators seeded for each batch.

    With `share`, it transforms and collates that share of each batch, as a `Part`.
    """

    def __init__(self, split: StreamSplit, size: int, seed: int, shares: int, share: Share | None) -> None:
        self.share = share
        self.stream, self.transform, self.collate = split.dataset, split.transform, split.collate or default_collate
        self.size, self.seed, self.shares, self.repeats = size, seed, shares, split.steps is not None
        self._turn = self._next = 0
        self._examples: Iterator[Any] | None = None

    def __getitem__(self, read: _StreamRead) -> Any:
        """Return a batch after reading the batches before it; None if the stream has ended.

        An error is returned, not raised, if the stream gives this worker no example.
        """
        if read.turn != self._turn:
            self._turn, self._next, self._examples = read.turn, read.number % self.shares, None
        for number in range(self._next, read.number, self.shares):
            with seeded(derive(self.seed, f"{read.epoch}/{number}")):
                self._read(read.epoch)
        self._next = read.number + self.shares
        with seeded(derive(self.seed, f"{read.epoch}/{read.number}")):
            examples = self._read(read.epoch)
            if examples and self.share is not None:
                return Part(self._collated(self.share.of(examples)), self.share.counts(len(examples)))
            if examples:
                return self._collated(examples)
        return self._no_examples(read.number % self.shares) if self.repeats else None

    def _collated(self, examples: list[Any]) -> Any:
        return self.collate([transformed(example, self.transform) for example in examples])

    def _read(self, epoch: int) -> list[Any]:
        """Return the next examples: a whole batch, or the last examples of a stream that is read to its end."""
        found: list[Any] = []
        while len(found) < self.size:
            is_new = self._examples is None
            if self._examples is None:
                self._examples = _start(self.stream, epoch)
            more = list(islice(self._examples, self.size - len(found)))
            found += more
            if not self.repeats or (is_new and not more):
                break
            if len(found) < self.size:
                self._examples = None
        return found

    def _no_examples(self, share: int) -> DataError:
        if self.shares == 1:
            return DataError("`data`: the train split is a stream without examples; it must give at least one.")
        return DataError(
            f"`data.num_workers` (={self.shares}) must be at most the number of shares of the training stream, but "
            f"worker {share + 1} got no example; pass a smaller number, or 0."
        )


def _start(stream: IterableDataset[Any], epoch: int) -> Iterator[Any]:
    if callable(set_epoch := getattr(stream, "set_epoch", None)):
        set_epoch(epoch)
    return iter(stream)


def _identity(batch: Any) -> Any:
    return batch
