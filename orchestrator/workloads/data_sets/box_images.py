"""Images with boxes, in the form of torchvision's references, and their batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.workloads.data_sets.named import Normalisation

Target: TypeAlias = Mapping[str, Tensor]
"""`boxes` (boxes, 4) in pixels as x1, y1, x2, y2; `labels` (boxes,); `image_id`; `area` and `iscrowd` where known."""


@dataclass(frozen=True)
class BoxImages(Dataset[tuple[Tensor, Target]]):
    """Images of one size and their targets.

    Args:
        pixels: index -> pixels in uint8 (channels, height, width).
        targets: one target for each image; equal `image_id`s name equal images.
        normalise: pixels of a batch -> inputs.
    """

    pixels: Callable[[int], Tensor]
    targets: Sequence[Target]
    normalise: Normalisation

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Target]:
        return self.normalise(self.pixels(index).unsqueeze(0))[0], self.targets[index]


def in_a_batch(examples: Sequence[tuple[Tensor, Target]]) -> tuple[Any, list[Target]]:
    """Return images and targets of a batch; images of one size as one tensor, others as a list."""
    images = [image for image, _ in examples]
    stacked = torch.stack(images) if len({image.shape for image in images}) == 1 else images
    return stacked, [target for _, target in examples]


def target(number: int, boxes: Sequence[Sequence[float]], labels: Sequence[int], **others: Sequence[float]) -> Target:
    """Return the target of image `number`; it may have no boxes."""
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "image_id": torch.tensor(number),
        **{name: torch.tensor(values) for name, values in others.items()},
    }
