"""A small detector without anchors: a class and four distances for each cell, after CenterNet (arXiv 1904.07850)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.errors import ModelError

STRIDE = 4
"""Pixels of a side of a cell."""
COARSEST = 8
"""Pixels of a side of a cell of the smallest feature map."""
MOST = 100
"""Largest number of detections in an image."""
LEAST = 1e-3
"""Smallest score of a detection."""
RARE = -4.6
"""Initial logit of a class: objects are at 1% of the cells."""
SPREAD = 6
"""Size of a box, in standard deviations of the Gaussian around its centre."""
BOXED = 0.5
"""Smallest height of that Gaussian at which a cell learns the box."""


class CenterNet(nn.Module):
    """Detector whose forward returns (batch, classes + 4, height / 4, width / 4), for images of any such size.

    For each cell, these are logits of classes, and logarithms of the distances from its middle to the left, top, right
    and bottom of a box, in cells. `losses` and `detections` read them.

    Args:
        channels: channels of an image.
        classes: number of labels.
        width: channels of the first feature map; the next have two and four times as many.
    """

    def __init__(self, channels: int, classes: int, width: int = 16) -> None:
        super().__init__()
        self.classes = classes
        self.stem = _layer(channels, width, 2)
        self.fine = nn.Sequential(_layer(width, 2 * width, 2), _layer(2 * width, 2 * width))
        deep = (_layer(4 * width, 4 * width) for _ in range(2))
        self.coarse = nn.Sequential(_layer(2 * width, 4 * width, 2), *deep)
        self.lateral = nn.Conv2d(4 * width, 2 * width, 1)
        self.merged = _layer(2 * width, 2 * width)
        self.head = nn.Conv2d(2 * width, classes + 4, 1)
        with torch.no_grad():
            self.head.bias[:classes] = RARE  # type: ignore[index]

    def forward(self, images: Tensor) -> Tensor:
        fine = self.fine(self.stem(images))
        coarse = F.interpolate(self.lateral(self.coarse(fine)), scale_factor=2.0, mode="nearest")
        found: Tensor = self.head(self.merged(fine + coarse))
        return found

    def losses(self, outputs: Tensor, targets: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Return the focal loss of classes with Gaussians around centres, plus 1 - GIoU of boxes, per box."""
        outputs = outputs.float()
        heat, weights, due = (torch.stack(each) for each in zip(*(self._due(outputs, t) for t in targets), strict=True))
        logits, peaks = outputs[:, : self.classes], heat == 1
        chance = logits.sigmoid()
        hits = F.logsigmoid(logits) * (1 - chance).square() * peaks
        misses = F.logsigmoid(-logits) * chance.square() * (1 - heat) ** 4
        overlap = _giou(self._boxes(outputs), due)
        boxes = (weights * (1 - overlap)).sum() / weights.sum().clamp(min=1)
        return boxes - (hits + misses).sum() / peaks.sum().clamp(min=1)

    def detections(self, outputs: Tensor) -> list[dict[str, Tensor]]:
        """Return the boxes of the highest cells among their neighbours, the most certain first."""
        outputs = outputs.float()
        chance = outputs[:, : self.classes].sigmoid()
        peaks = (chance * (F.max_pool2d(chance, 3, 1, 1) == chance)).flatten(1)
        scores, places = peaks.topk(min(MOST, peaks.shape[1]))
        cells = outputs.shape[-2] * outputs.shape[-1]
        boxes = self._boxes(outputs).flatten(1, 2)
        found = []
        for box, place, score in zip(boxes, places, scores, strict=True):
            place = place[score >= LEAST]
            found.append({"boxes": box[place % cells], "labels": place // cells, "scores": score[: len(place)]})
        return found

    def _boxes(self, outputs: Tensor) -> Tensor:
        """Return the box of each cell (batch, height, width, 4), within the image."""
        middles = _middles(outputs)
        distances = STRIDE * outputs[:, self.classes :].clamp(max=8).exp().permute(0, 2, 3, 1)
        boxes = torch.cat([middles - distances[..., :2], middles + distances[..., 2:]], -1)
        limits = STRIDE * outputs.new_tensor([outputs.shape[-1], outputs.shape[-2]]).repeat(2)
        return boxes.clamp(min=0).minimum(limits)

    def _due(self, outputs: Tensor, target: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return an image's heat (classes, height, width), the weights of its cells, and the boxes that they learn."""
        middles = _middles(outputs)
        heat = outputs.new_zeros(self.classes, *middles.shape[:2])
        boxes, labels = target["boxes"].float(), target["labels"]
        if not len(boxes):
            return heat, heat.new_zeros(middles.shape[:2]), heat.new_zeros(*middles.shape[:2], 4)
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        cells = ((centres / STRIDE).floor() + 0.5) * STRIDE
        spread = ((boxes[:, 2:] - boxes[:, :2]) / SPREAD).clamp(min=STRIDE / 4)
        away = (middles - cells[:, None, None]) / spread[:, None, None]
        height = (-away.square().sum(-1) / 2).exp()  # (boxes, height, width), 1 at the cell of the centre
        for label, each in zip(labels.tolist(), height, strict=True):
            heat[label] = heat[label].maximum(each)
        highest, chosen = height.max(0)
        return heat, highest * (highest >= BOXED), boxes[chosen]


def _middles(outputs: Tensor) -> Tensor:
    """Return the middles of the cells in pixels, x before y (height, width, 2)."""
    rows, columns = (STRIDE * (torch.arange(n, device=outputs.device) + 0.5) for n in outputs.shape[-2:])
    return torch.stack(torch.meshgrid(columns, rows, indexing="xy"), -1)


def _giou(boxes: Tensor, others: Tensor) -> Tensor:
    """Return the generalised intersection over union of pairs of boxes (arXiv 1902.09630)."""
    inner = (boxes[..., 2:].minimum(others[..., 2:]) - boxes[..., :2].maximum(others[..., :2])).clamp(min=0).prod(-1)
    outer = (boxes[..., 2:].maximum(others[..., 2:]) - boxes[..., :2].minimum(others[..., :2])).prod(-1)
    union = sum((each[..., 2:] - each[..., :2]).prod(-1) for each in (boxes, others)) - inner
    return inner / union.clamp(min=1e-6) - (outer - union) / outer.clamp(min=1e-6)


def _layer(fan_in: int, fan_out: int, stride: int = 1) -> nn.Sequential:
    """Return a 3x3 convolution, batch normalisation and ReLU."""
    conv = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(fan_out), nn.ReLU())


def centernet(input_shape: Sequence[int], classes: int, width: int = 16) -> CenterNet:
    """Return the detector for images whose sides are multiples of `COARSEST`."""
    if len(input_shape) != 3 or any(side % COARSEST for side in input_shape[1:]):
        raise ModelError(
            f"`model.input_shape` (={list(input_shape)}) must be [channels, height, width] with sides that are "
            f"multiples of {COARSEST} for centernet; resize the images."
        )
    return CenterNet(input_shape[0], classes, width)
