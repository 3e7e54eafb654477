"""Examples looked at one by one: the first of a split, and those that hold NaN or an infinity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.core.seeding import seeded
from orchestrator.workloads.splits import Batch, LoaderSplit, Split, TensorSplit
from orchestrator.workloads.streams import StreamSplit
from orchestrator.workloads.tasks.batch import given_labels, tensors


def first(split: Split) -> Any:
    """Return a batch of the first example of `split` alone, as it is stored; generators are restored."""
    if isinstance(split, TensorSplit):
        return split.take(torch.tensor([0]))
    with seeded(0):  # a Dataset may augment
        if not isinstance(split, LoaderSplit | StreamSplit):
            return next(iter(split.batches(1, device=torch.device("cpu"))))
        item = split.example()
        if split.collate is not None:
            return split.first()
        parts = [type(part).__name__ for part in item] if isinstance(item, list | tuple) else [type(item).__name__]
        if next(tensors(item), None) is None or (isinstance(item, list | tuple) and not isinstance(item[0], Tensor)):
            raise DataError(
                "`data`: an item of the training Dataset must be a pair (input tensor, label), or a dict or an object "
                f"with tensors, not ({', '.join(parts)}); add a transform such as torchvision.transforms.ToTensor()."
            )
        return split.first()


@dataclass(frozen=True)
class Spoilt:
    """An example whose inputs or labels hold NaN or an infinity."""

    index: int | None
    """Its place in what was searched; None where that is not known."""
    part: str
    """`inputs` or `labels`."""
    value: float

    def refusal(self, split: str, data: str = "`data`") -> str:
        """Return a sentence that blames `data` for the example of this split."""
        example = "an example" if self.index is None else f"example {self.index} (counted from 0)"
        return (
            f"{data} must give finite numbers, and the {self.part} of {example} of its {split} split hold "
            f"{self.value}; replace such values, or leave the example out."
        )


def spoilt(batch: Batch) -> Spoilt | None:
    """Return the first example of a batch that holds NaN or an infinity, with its index in the batch."""
    labels = given_labels(batch)
    for tensor in tensors(batch):
        if tensor.is_floating_point() and not bool((finite := tensor.isfinite()).all()):
            place = (~finite).nonzero()[0]
            index = int(place[0]) if tensor.ndim else 0
            return Spoilt(index, "labels" if tensor is labels else "inputs", float(tensor[tuple(place)]))
    return None


def spoilt_in(batches: Iterable[Batch], size: int) -> Spoilt | None:
    """Return the first example that holds NaN or an infinity in batches of `size` examples, as they come."""
    for number, batch in enumerate(batches):
        if found := spoilt(batch):
            return replace(found, index=number * size + (found.index or 0))
    return None


def require_finite(splits: Mapping[str, Split], size: int, device: torch.device, said: str) -> None:
    """Raise `DataError` for the first example of `splits` that holds NaN or an infinity, in the order as stored.

    Args:
        splits: by name.
        size: examples of a batch.
        device: where batches go.
        said: what begins the message: what is explained so.
    """
    for name, split in splits.items():
        if found := spoilt_in(split.batches(size, device=device), size):
            raise DataError(f"{said}: {found.refusal(name)}")
