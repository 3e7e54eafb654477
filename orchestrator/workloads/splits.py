"""The three splits of a data set, and batches from them: tensors on the device, or a DataLoader."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from orchestrator.core.seeding import seeded

Batch = tuple[Tensor, Tensor]
"""Inputs (batch, ...) and labels (batch,), on the device."""


class Batches(Protocol):
    """One epoch each time it is iterated; `len` is the number of batches."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Batch]: ...


class Split(Protocol):
    """A train, validation or test split."""

    def __len__(self) -> int:
        """Number of examples."""
        ...

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`: in the order of a new permutation from `generator` each epoch, or as stored."""
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
        stored = chosen if self.rows is None else self.rows[chosen]
        images = self.images.index_select(0, stored)
        return (images if self.normalise is None else self.normalise(images)), self.labels[stored]

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
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`: in the order of a new permutation from `generator` each epoch, or as stored."""
        return _TensorBatches(self.to(device), batch_size, generator, drop_last)


@dataclass(frozen=True)
class LoaderSplit:
    """A split read example by example from a Dataset of the user's, for data that does not fit or is augmented."""

    dataset: Dataset[Any]
    num_workers: int = 0

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
        return LoaderSplit(Subset(self.dataset, rows.tolist()), self.num_workers)

    def batches(
        self,
        batch_size: int,
        *,
        device: torch.device,
        generator: torch.Generator | None = None,
        drop_last: bool = False,
    ) -> Batches:
        """Return batches on `device`: in the order of a new permutation from `generator` each epoch, or as stored.

        Worker processes, if any, live through all epochs; they and the loader are seeded from `generator`.
        """
        return _LoaderBatches(self, batch_size, device, generator, drop_last)


def _length(dataset: Dataset[Any]) -> int:
    assert isinstance(dataset, Sized)  # `data.load` refuses a Dataset without a length
    return len(dataset)


class _TensorBatches:
    def __init__(self, split: TensorSplit, size: int, generator: torch.Generator | None, drop_last: bool) -> None:
        self.split = split
        self.size = size
        self.generator = generator
        self.stop = len(split) // size * size if drop_last else len(split)

    def __len__(self) -> int:
        return -(-self.stop // self.size)

    def __iter__(self) -> Iterator[Batch]:
        # Drawn on the CPU, so that the order is the same on every device.
        order = _order(len(self.split), self.generator).to(self.split.device)
        for start in range(0, self.stop, self.size):
            yield self.split.take(order[start : min(start + self.size, self.stop)])


class _LoaderBatches:
    def __init__(
        self,
        split: LoaderSplit,
        size: int,
        device: torch.device,
        generator: torch.Generator | None,
        drop_last: bool,
    ) -> None:
        self.device = device
        # The loader draws its workers' seeds from a generator of its own: orders are those of a TensorSplit.
        own = torch.Generator().manual_seed(0 if generator is None else generator.initial_seed())
        self.loader: DataLoader[Any] = DataLoader(
            split.dataset,
            batch_size=size,
            sampler=_Order(len(split), generator),
            generator=own,
            num_workers=split.num_workers,
            persistent_workers=split.num_workers > 0,
            pin_memory=device.type == "cuda",
            drop_last=drop_last,
        )

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        for inputs, labels in self.loader:
            yield inputs.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)


class _Order(Sampler[int]):
    """Indices in the order of a new permutation each epoch, or as stored."""

    def __init__(self, length: int, generator: torch.Generator | None) -> None:
        self.length = length
        self.generator = generator

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(_order(self.length, self.generator).tolist())


def _order(length: int, generator: torch.Generator | None) -> Tensor:
    """Return the indices of a new permutation, or as stored."""
    return torch.arange(length) if generator is None else torch.randperm(length, generator=generator)
