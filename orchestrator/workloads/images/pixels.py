"""Pixels as they are kept, in uint8, and the splits of them: each batch is normalised by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads.splits import TensorSplit


def by_split(images: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Tensor]:
    """Give the tensors of (train, test) the names that they are kept under."""
    return {"train": images[0], "train_labels": labels[0], "test": images[1], "test_labels": labels[1]}


def splits_of(kept: Mapping[str, Tensor], normalise: Normalisation) -> dict[str, TensorSplit]:
    """Return the splits of what `by_split` named."""
    labels = {name: kept[f"{name}_labels"] for name in ("train", "test")}
    labels = {name: each if each.is_floating_point() else each.long() for name, each in labels.items()}
    return {name: TensorSplit(kept[name], labels[name], normalise) for name in labels}


@dataclass(frozen=True)
class Normalisation:
    """uint8 pixels (examples, channels, height, width) -> (pixels / largest - mean) / std in float32."""

    mean: Tensor
    std: Tensor
    largest: int = 255

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], *, channels: int, largest: int = 255) -> Normalisation:
        """Return the one with this `mean` and `std`, each of one entry or of one a channel."""
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise DataError(f"`data.{name}` (={list(values)}) must have 1 or {channels} entries, one a channel.")
        if min(std) <= 0:
            raise DataError(f"`data.std` (={list(std)}) must be positive; pass [1.0] to leave the scale as it is.")
        centre, scale = (torch.tensor(list(values)).view(1, -1, 1, 1) for values in (mean, std))
        return cls(centre, scale, largest)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(self.largest).sub_(self.mean).div_(self.std)
