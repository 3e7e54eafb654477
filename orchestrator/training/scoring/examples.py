"""Scoring examples: taken from the training split without augmentation, in an order drawn by a seed of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.stage_fields import ScoreFields
from orchestrator.workloads.splits import Batch, Batches, LoaderSplit, Split
from orchestrator.workloads.streamed_splits import StreamSplit
from orchestrator.workloads.tasks.batch import given_labels, tensors

SEARCHED = 256
"""Batch size of the search for examples of each class."""


@dataclass(frozen=True)
class ScoringData:
    """Examples for scores: the number that `asked` requests from `split`, in the order drawn by `seed`, on `device`."""

    split: Split
    asked: ScoreFields
    seed: int
    device: torch.device

    def batches(self, rescorings: int) -> list[Batch] | None:
        """Return the batches of all re-scorings, or None if the score reads no examples.

        Every re-scoring gets the same number of batches, with other examples.

        Raises:
            OrchestratorError: `per_class` is set, and the data have no classes.
        """
        if self.asked.per_class is not None:
            return [batch for number in range(rescorings) for batch in self._examples_per_class(number)]
        if self.asked.examples is None:
            return None
        return list(self._examples(rescorings))

    def _examples(self, rescorings: int) -> Iterator[Batch]:
        split, asked = _unaugmented(self.split), int(self.asked.examples or 0)
        length = None if isinstance(split, StreamSplit) else len(split)
        most = asked if length is None else min(asked, length)
        size = min(self.asked.batch_size or most, most)
        whole = length is not None and most == length
        batches = split.batches(size, device=self.device, seed=self.seed, drop_last=not whole)
        found = _endless(batches)
        for _ in range(rescorings * -(-most // size)):
            yield next(found)

    def _examples_per_class(self, epoch: int) -> Iterator[Batch]:
        """Yield batches of the first `per_class` examples of each class, in the order of epoch `epoch`."""
        count, size = int(self.asked.per_class or 0), self.asked.batch_size
        batches = _unaugmented(self.split).batches(SEARCHED, device=self.device, seed=self.seed)
        taken: dict[int, int] = {}
        found = []
        for batch in batches.epoch(epoch):
            chosen = []
            for index, label in enumerate(self._classes(batch).tolist()):
                if taken.get(label, 0) < count:
                    taken[label] = taken.get(label, 0) + 1
                    chosen.append(index)
            if chosen:
                found.append(_rows(batch, torch.tensor(chosen, device=self.device)))
        whole = _concatenated(found)
        rows = torch.arange(sum(taken.values()), device=self.device)
        for part in torch.split(rows, size or len(rows)):
            yield _rows(whole, part)

    def _classes(self, batch: Batch) -> Tensor:
        labels = given_labels(batch)
        if labels is None or labels.is_floating_point() or labels.dim() != 1:
            raise OrchestratorError(
                f"`score.per_class` (={self.asked.per_class}) must be null for `data` without one class for each "
                "example; pass score.per_class=null score.examples=128."
            )
        return labels


def count(batch: Batch) -> int:
    """Return the number of examples in a batch."""
    return next((len(tensor) for tensor in tensors(batch) if tensor.dim()), 0)


def _unaugmented(split: Split) -> Split:
    return replace(split, transform=None) if isinstance(split, LoaderSplit | StreamSplit) else split


def _endless(batches: Batches) -> Iterator[Batch]:
    epoch = 0
    while True:
        yield from batches.epoch(epoch)
        epoch += 1


def _rows(batch: Any, rows: Tensor) -> Any:
    """Return the given rows of every tensor in a batch: a tensor, or nested tuples, lists and mappings."""
    if isinstance(batch, Tensor):
        return batch[rows]
    if isinstance(batch, Mapping):
        return {name: _rows(value, rows) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return tuple(_rows(value, rows) for value in batch)
    return batch


def _concatenated(batches: Sequence[Any]) -> Any:
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {name: _concatenated([batch[name] for batch in batches]) for name in first}
    if isinstance(first, list | tuple):
        return tuple(_concatenated(parts) for parts in zip(*batches, strict=True))
    return first
