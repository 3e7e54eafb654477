"""Detection: the detector's own loss, and COCO's mean average precision and recall of its boxes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.data_sets.box_images import Target
from orchestrator.workloads.tasks.batch import BatchError, kind, targets_of
from orchestrator.workloads.tasks.detectors import form_of
from orchestrator.workloads.tasks.task import Summed

MAP = Metric("mAP", "%", "higher", margin=0.01, format=".2%")
"""COCO's mean average precision: the mean over classes and the overlaps (IoU) 0.5, 0.55, ..., 0.95."""
MAP_50 = Metric("mAP_50", "%", "higher", margin=0.01, format=".2%")
"""Mean average precision at the overlap 0.5."""
RECALL = Metric("recall", "%", "higher", margin=0.01, format=".2%")
"""Fraction of boxes that are found with at most 100 detections per image; the mean over the same overlaps."""
OF_STATS = {MAP.name: 0, MAP_50.name: 1, RECALL.name: 8}
"""Metric -> its place among the twelve figures of COCO."""


@dataclass(frozen=True)
class Seen:
    """Image in an evaluation: its boxes, and the detector's.

    Args:
        order: `image_id` of its target; images are evaluated in this order.
        truth: annotations in COCO's form, without ids.
        found: detections in COCO's form, without ids.
    """

    order: int
    truth: Sequence[Mapping[str, Any]]
    found: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Detections:
    """Images of a split, or of a part of one; the sum of two parts has the images of both."""

    images: tuple[Seen, ...] = ()
    losses: tuple[tuple[float, int], ...] = ()
    """Loss and number of images of each batch."""

    def __add__(self, other: Detections) -> Detections:
        return Detections((*self.images, *other.images), (*self.losses, *other.losses))

    @property
    def loss(self) -> float:
        """Mean loss over images; NaN if a loss is not finite."""
        count = sum(size for _, size in self.losses)
        finite = count and all(math.isfinite(loss) for loss, _ in self.losses)
        return math.fsum(loss * size for loss, size in self.losses) / count if finite else math.nan

    @cached_property
    def evaluated(self) -> tuple[Sequence[float], Mapping[int, float]]:
        """COCO's figures of all images, see `evaluated`."""
        return evaluated(sorted(self.images, key=lambda image: image.order))


class Detection(Summed[Detections]):
    """Detection of objects: batches are (images, targets), as in torchvision's references.

    Images are a tensor (batch, channels, height, width), or a list of tensors of several sizes if the detector takes
    one. A target is a dict with `boxes` (boxes, 4) in pixels as x1, y1, x2, y2 and `labels` (boxes,); it may have no
    boxes. `iscrowd` and `area` count as in COCO. Images are evaluated in the order of `image_id`, which decides
    between detections of equal scores; without it, in the order in which they are read.

    The detector gives its loss and its boxes, see `detectors`. The loss of a split is the mean over batches, weighted
    by images: a detector that divides by the boxes of a batch has another loss for batches of other sizes. The metrics
    do not depend on batches.
    """

    metrics = (MAP, MAP_50, RECALL)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the detector's loss."""
        return form_of(model).loss(*_read(batch))

    def size(self, batch: Any) -> int:
        """Return the number of images."""
        return len(_read(batch)[1])

    def totals(self, model: nn.Module, batches: Iterable[Any]) -> Detections:
        """Return the boxes and detections of some batches."""
        detector, images, losses = form_of(model), [], []
        for batch in batches:
            inputs, targets = _read(batch)
            loss, found = detector.measured(inputs, targets)
            losses.append((float(loss.detach()), len(targets)))
            images += [_seen(*each) for each in zip(targets, found, strict=True)]
        return Detections(tuple(images), tuple(losses))

    def figures(self, totals: Detections) -> Mapping[str, float]:
        """Return loss, mean average precisions and recall; NaN without boxes."""
        stats, _ = totals.evaluated
        rates = {name: stats[place] for name, place in OF_STATS.items()}
        return {"loss": totals.loss, **{name: math.nan if rate < 0 else rate for name, rate in rates.items()}}

    def details(self, totals: Detections) -> Mapping[str, Any]:
        """Return the mean average precision of each class, and that of a detector that finds nothing."""
        _, by_class = totals.evaluated
        rates = [by_class.get(label) for label in range(max(by_class, default=-1) + 1)]
        return {"rates": rates, "images": len(totals.images), "constant": 0.0}


def evaluated(images: Sequence[Seen]) -> tuple[Sequence[float], Mapping[int, float]]:
    """Return COCO's twelve figures of some images, -1 where no box counts; and class -> mean average precision.

    Classes without boxes are left out. faster-coco-eval computes the figures.
    """
    from faster_coco_eval import COCO, COCOeval_faster

    truth = [{"image_id": n, **each} for n, image in enumerate(images) for each in image.truth]
    found = [{"image_id": n, **each} for n, image in enumerate(images) for each in image.found]
    labels = sorted({each["category_id"] for each in truth})
    if not labels:
        return [-1.0] * 12, {}
    boxes = COCO(
        {
            "info": {},
            "images": [{"id": n} for n in range(len(images))],
            "categories": [{"id": label} for label in labels],
            "annotations": [{"id": n, **each} for n, each in enumerate(truth, 1)],  # COCO matches no id 0
        }
    )
    result = COCOeval_faster(boxes, boxes.loadRes(found), "bbox", print_function=lambda *_: None)
    result.run()
    precision = result.eval["precision"][
        :, :, :, 0, -1
    ]  # overlaps, recalls, classes; of all areas, with 100 detections
    means = {label: float(precision[:, :, place].mean()) for place, label in enumerate(labels)}
    return [*map(float, result.stats)], {label: mean for label, mean in means.items() if mean >= 0}


def _seen(target: Target, found: Mapping[str, Tensor]) -> Seen:
    """Return an image's annotations and its detections with finite numbers."""
    boxes, scores = found["boxes"].detach().cpu().double(), found["scores"].detach().cpu().double()
    finite = boxes.isfinite().all(1) & scores.isfinite()
    scored = {"category_id": found["labels"].cpu()[finite], "score": scores[finite]}
    truth = target["boxes"].cpu().double()
    areas = (truth[:, 2:] - truth[:, :2]).prod(1)
    known = {
        "area": target.get("area", areas),
        "iscrowd": target.get("iscrowd", torch.zeros(len(truth), dtype=torch.int)),
    }
    return Seen(
        int(target.get("image_id", 0)),
        _annotations(truth, category_id=target["labels"], **known),
        _annotations(boxes[finite], **scored),
    )


def _annotations(boxes: Tensor, **values: Tensor) -> list[dict[str, Any]]:
    """Return boxes in COCO's form: x, y, width, height."""
    sides = torch.cat([boxes[:, :2], boxes[:, 2:] - boxes[:, :2]], 1).tolist()
    columns = zip(*(each.tolist() for each in values.values()), strict=True)
    return [{"bbox": box, **dict(zip(values, row, strict=True))} for box, row in zip(sides, columns, strict=True)]


def _read(batch: Any) -> tuple[Any, Sequence[Target]]:
    """Return images and targets of a batch; raise `BatchError` for another form."""
    targets = targets_of(batch)
    if targets and all(each["boxes"].shape == (len(each["labels"]), 4) for each in targets):
        return batch[0], targets
    raise BatchError(
        "`task` (=detection) needs batches (images, targets) with a dict for each image, whose `boxes` have the shape "
        f"(boxes, 4) and whose `labels` have the shape (boxes,), found {kind(batch)}; return them from the Dataset, "
        "and a `collate` that keeps targets in a list, as orchestrator.workloads.data_sets.box_images.in_a_batch does."
    )
