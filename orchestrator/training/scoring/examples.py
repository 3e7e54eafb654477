"""Scoring examples, taken from the training split without augmentation, and their statistics that trials share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.specs import ScoreFields, StageSpec
from orchestrator.training.state.checkpointing import environment
from orchestrator.workloads import node_cache
from orchestrator.workloads.splits import Batch, Batches, LoaderSplit, Split
from orchestrator.workloads.streamed_splits import StreamSplit
from orchestrator.workloads.tasks.batch import given_labels, tensors
from orchestrator.workloads.weight_files import state_digest

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


FIELDS = ("seed", "round", "score", "task", "sources")
"""Fields of a round that decide the statistics under its score, besides the network, the masks and the examples."""
VERSIONS = ("training", "round", "score/", "task/")
"""Beginnings of the names of components whose versions decide them."""
PASSES = ":passes"
"""Name of the number of passes beside the statistics, which are named by parameters."""


class CountedLoss:
    """Loss that counts its calls."""

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self._loss, self.calls = loss, 0

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        return self._loss(model, batch)


@dataclass(frozen=True)
class SharedStatistics:
    """The argument `remember` of `pruning.plan`: statistics that the processes of a node share.

    The calls of the loss are counted as if the statistics had been computed, so that records of equal keys are equal.

    Args:
        source: result of `source_of`.
        batches: the examples of the score.
        loss: the loss that computes the statistics.
        device: device of the network.
    """

    source: Mapping[str, Any]
    batches: Sequence[Batch] | None
    loss: CountedLoss
    device: torch.device

    def __call__(self, key: Sequence[str], make: Callable[[], Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Return the result of `make`, or an equal one of an earlier call."""
        earlier = self.loss.calls

        def counted() -> dict[str, Tensor]:
            made = {name: each.cpu().contiguous() for name, each in make().items()}
            return made | {PASSES: torch.tensor(self.loss.calls - earlier)}

        examples = state_digest(
            {
                f"{batch}/{place}": tensor
                for batch, each in enumerate(self.batches or ())
                for place, tensor in enumerate(tensors(each))
            }
        )
        source = {**self.source, "statistics": [*key], "examples": examples}
        found = dict(node_cache.shared(source, counted, node_cache.STATISTICS))
        self.loss.calls = earlier + int(found.pop(PASSES))
        return {name: each.to(self.device) for name, each in found.items()}


def source_of(spec: StageSpec, weights: str, data: str, device: torch.device) -> dict[str, Any] | None:
    """Return JSON values that, with the examples, determine the statistics of a round; None if they are not shared.

    The values are those of the stage's key without the values that only decide how many weights are pruned: the key of
    the parent stage covers the network, its masks so far and the data set. A loss or a task of the user's own may hold
    state that the passes change, so its statistics are not shared.

    Args:
        spec: the round.
        weights: digest of the committed weights that the round starts from; empty in a rehearsal, which shares nothing.
        data: digest of the user's own data.
        device: device of the network.
    """
    loss, task = spec.training_config.get("loss"), spec.fields.get("task")
    if not weights or spec.parent is None or "_target_" in (loss or {}) or "_target_" in (task or {}):
        return None
    fields = {name: spec.fields[name] for name in FIELDS if name in spec.fields}
    versions = {name: each for name, each in spec.fields.get("versions", {}).items() if name.startswith(VERSIONS)}
    return {
        "parent": [spec.parent, weights, data],
        "fields": fields | {"versions": versions, "loss": loss},
        "environment": environment(str(device)) | {"threads": torch.get_num_threads()},
    }
