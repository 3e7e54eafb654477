"""Segmentation: cross-entropy per pixel, and the overlap of predicted and labelled pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks.batch import labels_of
from orchestrator.workloads.tasks.supervised import Supervised, add_places, class_labels, misfit
from orchestrator.workloads.tasks.totals import Totals

MEAN_IOU = Metric("mean_iou", "%", "higher", margin=0.01, format=".2%")
"""Mean over classes of intersection / union of predicted and labelled pixels; empty unions are left out."""
PIXELS = Metric("pixel_accuracy", "%", "higher", margin=0.01, format=".2%")
"""Fraction of pixels whose predicted class is their label."""


class Segmentation(Supervised):
    """Segmentation, a class per pixel: outputs (batch, classes, height, width), integer labels (batch, height, width).

    Args:
        ignore_index: label of the pixels that are ignored.
    """

    metrics = (MEAN_IOU, PIXELS)

    def __init__(self, ignore_index: int = 255) -> None:
        super().__init__(torch.nn.CrossEntropyLoss(ignore_index=ignore_index))
        self.ignore_index = ignore_index

    def size(self, batch: Any) -> int:
        """Return the number of pixels that are not ignored."""
        return int((labels_of(batch) != self.ignore_index).sum())

    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and the classes of pixels."""
        labels = class_labels("segmentation", labels_of(batch))
        if labels.ndim == 4 and labels.shape[1] == 1:
            labels = labels.squeeze(1)
        if labels.ndim != 3 or outputs.ndim != 4 or (outputs.shape[0], *outputs.shape[2:]) != tuple(labels.shape):
            need = f"outputs of shape (batch, classes, height, width) for labels of shape {tuple(labels.shape)}"
            raise misfit("segmentation", need, outputs, "choose another `task`, `model` or `data`")
        return outputs, labels

    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Count pairs (label, prediction) of classes."""
        classes = outputs.shape[1]
        known = labels != self.ignore_index
        add_places(totals, losses, examples, known.sum(), labels.numel())
        pairs = classes * labels[known] + outputs.argmax(1)[known]
        totals.count("confusion", torch.bincount(pairs, minlength=classes**2)[: classes**2].view(classes, classes))

    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return loss, mean IoU and pixel accuracy."""
        loss = {"loss": totals.mean("loss", "known")}
        matrix, found = totals.counted("confusion"), self.details(totals)
        ious = [hits / union for hits, union in zip(found["hits"], found["of"], strict=True) if union]
        pixels = int(matrix.sum())
        if not pixels:
            return loss | {MEAN_IOU.name: math.nan, PIXELS.name: math.nan}
        iou = math.fsum(ious) / len(ious)
        return loss | {MEAN_IOU.name: iou, PIXELS.name: int(matrix.diagonal().sum()) / pixels}

    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return, per class, the pixels in the intersection (`hits`) and union (`of`), and the best constant IoU."""
        matrix = totals.counted("confusion")
        hits = matrix.diagonal()
        unions = matrix.sum(0) + matrix.sum(1) - hits
        labelled = matrix.sum(1)  # one class everywhere overlaps with its own pixels alone
        shares = int(labelled.sum()) * int((labelled > 0).sum())
        constant = {"constant": int(labelled.max()) / shares} if shares else {}
        return {"hits": hits.tolist(), "of": unions.tolist(), **constant}
