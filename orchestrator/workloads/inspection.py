"""Inspect examples: the first of a split, NaN or infinity, digests of splits, and examples that splits share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset

from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.core.seeding import seeded
from orchestrator.workloads.splits import Batch, LoaderSplit, Split, TensorSplit
from orchestrator.workloads.streamed_splits import StreamSplit
from orchestrator.workloads.tasks.batch import given_labels, tensors
from orchestrator.workloads.weight_files import state_digest

FEW = 8
"""Number of examples that are read from a split that is not held in memory."""
MOST = 2**26
"""Largest number of bytes of inputs, and of labels, that the digest of a split in memory covers, or a comparison."""


def first(split: Split) -> Any:
    """Return a batch with only the first example of `split`; the random generators are restored."""
    if isinstance(split, TensorSplit):
        return split.take(torch.tensor([0]))
    with seeded(0):  # a Dataset may augment
        if not isinstance(split, LoaderSplit | StreamSplit):
            return next(iter(split.batches(1, device=torch.device("cpu"))))
        item = split.example()
        if split.collate is not None:
            return split.alone(1)[0]
        parts = [type(part).__name__ for part in item] if isinstance(item, list | tuple) else [type(item).__name__]
        if next(tensors(item), None) is None or (isinstance(item, list | tuple) and not isinstance(item[0], Tensor)):
            raise DataError(
                "`data`: an item of the training Dataset must be a pair (input tensor, label), or a dict or an object "
                f"with tensors, not ({', '.join(parts)}); add a transform such as torchvision.transforms.ToTensor()."
            )
        return split.alone(1)[0]


@dataclass(frozen=True)
class Spoilt:
    """Example whose inputs or labels contain NaN or infinity."""

    index: int | None
    """Index among the searched examples; None if it is unknown."""
    part: str
    """`inputs` or `labels`."""
    value: float

    def refusal(self, split: str, data: str = "`data`") -> str:
        """Return a sentence that blames `data` for this example of `split`."""
        example = "an example" if self.index is None else f"example {self.index} (counted from 0)"
        return (
            f"{data} must give finite numbers, but the {self.part} of {example} of its {split} split contain "
            f"{self.value}; replace such values, or leave the example out."
        )


def spoilt(batch: Batch) -> Spoilt | None:
    """Return the first example with NaN or infinity in a batch, with its index in the batch; None if there is none."""
    labels = given_labels(batch)
    for tensor in tensors(batch):
        if tensor.is_floating_point() and not bool((finite := tensor.isfinite()).all()):
            place = (~finite).nonzero()[0]
            index = int(place[0]) if tensor.ndim else 0
            return Spoilt(index, "labels" if tensor is labels else "inputs", float(tensor[tuple(place)]))
    return None


def spoilt_in(batches: Iterable[Batch], size: int) -> Spoilt | None:
    """Return the first example with NaN or infinity in a sequence of batches of `size` examples."""
    for number, batch in enumerate(batches):
        if found := spoilt(batch):
            return replace(found, index=number * size + (found.index or 0))
    return None


def require_finite(splits: Mapping[str, Split], size: int, device: torch.device, said: str) -> None:
    """Raise `DataError` for the first example of `splits` that contains NaN or infinity, in stored order.

    Args:
        splits: splits by name.
        size: batch size.
        device: device of the batches.
        said: beginning of the message: the effect that the example explains.
    """
    for name, split in splits.items():
        if found := spoilt_in(split.batches(size, device=device), size):
            raise DataError(f"{said}: {found.refusal(name)}")


def digests_of(splits: Mapping[str, Split]) -> dict[str, str]:
    """Return the SHA-256 of each split by name; it differs between loads with different data.

    The digest covers whole tensors held in memory, or evenly spaced examples beyond `MOST` bytes. For a Dataset it
    covers `FEW` evenly spaced examples; for a stream, or a split of the user's own class, the first `FEW`, as a
    training gets them.

    Raises:
        DataError: an example cannot be read.
    """
    found = {}
    for name, split in splits.items():
        try:
            with seeded(0):  # for the random draws of a Dataset
                found[name] = state_digest(_sampled(split))
        except OrchestratorError:
            raise
        except Exception as error:
            raise unreadable(name, error) from error
    return found


def shared_examples(train: Split, val: Split, test: Split, data: str) -> int | None:
    """Return how many test examples are training or validation examples, too; None if they cannot be compared.

    Splits in memory are compared byte by byte if each has at most `MOST` bytes; parts of one Dataset by their indices.

    Args:
        train: the training split.
        val: the validation split.
        test: the test split.
        data: what gives the splits, for the error.

    Raises:
        DataError: the test split is the training split, before or after the validation split was cut from it.
    """
    learned, chosen, tested = map(_identities, (train, val, test))
    if learned is None or chosen is None or tested is None or len({*map(type, (train, val, test))}) > 1:
        return None
    if tested in (learned, learned + chosen):
        raise DataError(
            f"{data} must give a test split of its own, but its {tested.total():,} test examples are those of the "
            "training split; return examples that no network learns from."
        )
    known = learned.keys() | chosen.keys()
    if isinstance(test, LoaderSplit) and {base for base, _ in tested}.isdisjoint(base for base, _ in known):
        return None  # two Datasets, whose examples would all have to be read
    return sum(number for each, number in tested.items() if each in known)


def _identities(split: Split) -> Counter[tuple[int, int]] | None:
    """Return how often a split has each example; None if that is unknown unless all examples are read.

    An example in memory is known by a hash of its inputs and one of its labels, one of a Dataset by its index there.
    """
    if isinstance(split, TensorSplit):
        parts = (split.images, split.labels)
        if any(part.nbytes > MOST or part.layout is not torch.strided for part in parts):
            return None
        rows = torch.arange(len(split.labels), device=split.device) if split.rows is None else split.rows
        return Counter(zip(*(_hashes(part.index_select(0, rows).cpu()) for part in parts), strict=True))
    if not isinstance(split, LoaderSplit):
        return None
    dataset: Any = split.dataset
    indices: Sequence[int] = range(len(split))
    while isinstance(dataset, Subset):
        dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
    return Counter((id(dataset), index) for index in indices)


def _hashes(examples: Tensor) -> list[int]:
    """Return a hash of the bytes of each example."""
    rows = examples.flatten(1) if examples.ndim > 1 else examples.unsqueeze(1)
    return [hash(row.tobytes()) for row in rows.contiguous().view(torch.uint8).numpy()]


def unreadable(split: str, error: BaseException) -> DataError:
    """Return the error to raise if examples of a split cannot be read."""
    said = " ".join(str(error).split()) or "(no message)"
    return DataError(
        f"`data`: examples of the {split} split cannot be read: {type(error).__name__}: {said.rstrip('.')}; fix the "
        "data that `data` names."
    )


def _sampled(split: Split) -> dict[str, Tensor]:
    """Return the tensors of a split that its digest covers, and its length if it has one."""
    if isinstance(split, TensorSplit):
        parts = {"inputs": split.images, "labels": split.labels}
        return {"length": torch.tensor(len(split)), **{name: _rows(part, split) for name, part in parts.items()}}
    batches: Iterable[Batch]
    if isinstance(split, LoaderSplit | StreamSplit):
        batches = split.alone(FEW)
    else:
        batches = islice(split.batches(FEW, device=torch.device("cpu")), 1)
    held = [tensor for batch in batches for tensor in tensors(batch) if tensor.layout is torch.strided]
    length = {} if isinstance(split, StreamSplit) else {"length": torch.tensor(len(split))}
    return length | {str(number): tensor for number, tensor in enumerate(held)}


def _rows(part: Tensor, split: TensorSplit) -> Tensor:
    """Return the inputs or labels of a split, or evenly spaced ones if there are too many."""
    count = min(len(split), max(FEW, MOST // max(1, part[:1].nbytes)))
    chosen = torch.arange(count, device=part.device) * len(split) // count
    return part.index_select(0, chosen if split.rows is None else split.rows.index_select(0, chosen))
