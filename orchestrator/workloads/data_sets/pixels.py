"""Pixels in uint8, and splits of them that normalise each batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads.splits import TensorSplit


def by_split(images: Sequence[Tensor], labels: Sequence[Tensor]) -> dict[str, Tensor]:
    """Return images and labels of (train, test) under the names of their stored tensors."""
    return {"train": images[0], "train_labels": labels[0], "test": images[1], "test_labels": labels[1]}


def splits_of(kept: Mapping[str, Tensor], normalise: Normalisation) -> dict[str, TensorSplit]:
    """Return the splits of the tensors that `by_split` named."""
    labels = {name: kept[f"{name}_labels"] for name in ("train", "test")}
    labels = {name: each if each.is_floating_point() else each.long() for name, each in labels.items()}
    return {name: TensorSplit(kept[name], labels[name], normalise) for name in labels}


@dataclass(frozen=True)
class Normalisation:
    """Normalise uint8 pixels (examples, channels, height, width): (pixels / largest - mean) / std in float32."""

    mean: Tensor
    std: Tensor
    largest: int = 255

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], *, channels: int, largest: int = 255) -> Normalisation:
        """Build a normalisation from `mean` and `std`, each with one entry, or with one entry per channel."""
        for name, values in (("mean", mean), ("std", std)):
            if len(values) not in (1, channels):
                raise DataError(f"`data.{name}` (={list(values)}) must have 1 or {channels} entries, one per channel.")
        if min(std) <= 0:
            raise DataError(f"`data.std` (={list(std)}) must be positive; pass [1.0] to keep the scale.")
        centre, scale = (torch.tensor(list(values)).view(1, -1, 1, 1) for values in (mean, std))
        return cls(centre, scale, largest)

    def __call__(self, pixels: Tensor) -> Tensor:
        return pixels.float().div_(self.largest).sub_(self.mean).div_(self.std)
