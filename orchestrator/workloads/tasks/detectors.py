"""Detectors by the form of their code: how they give a loss and boxes.

- A network with `losses(outputs, targets)` and `detections(outputs)`, such as `model=centernet`: its forward returns a
  tensor, which every deployment format can compute.
- A detector of torchvision: forward(images, targets) returns a dict of losses in training, and a list of dicts with
  `boxes`, `labels` and `scores` in evaluation. A network of your own may do the same.
- A detector of transformers: forward(pixel_values, labels=...) returns a loss, and logits and boxes that the image
  processor of the library turns into detections.
- A YOLO of ultralytics, with the loss of its trainer and the suppression of its validation.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from orchestrator.core.errors import OrchestratorError
from orchestrator.workloads.data_sets.box_images import Target
from orchestrator.workloads.tasks.batch import BatchError, kind, outputs_of, own_loss

Found = Mapping[str, Tensor]
"""`boxes` (detections, 4) in pixels as x1, y1, x2, y2; `labels` and `scores` (detections,)."""
PROCESSORS = {"rt_detr_v2": "rt_detr", "d_fine": "rt_detr", "dab-detr": "conditional_detr"}
"""Type of model without an image processor of its own -> the type whose processor reads its outputs."""

YOLO = ("ultralytics.nn.tasks", "DetectionModel")
"""Module and name of the class of ultralytics' detectors."""
HEADS = ("Detect", "v10Detect")
"""Classes of the last module of those that detect boxes alone."""


@dataclass(frozen=True)
class Form(ABC):
    """Detector of some form.

    Args:
        model: the network to call.
        inner: the network that knows the rest, if `model` only runs it in another runtime.
    """

    model: nn.Module
    inner: Any

    @abstractmethod
    def measured(self, images: Any, targets: Sequence[Target]) -> tuple[Tensor, Sequence[Found]]:
        """Return the loss of a batch, and the detections in each image, in evaluation."""

    def loss(self, images: Any, targets: Sequence[Target]) -> Tensor:
        """Return the differentiable loss of a batch."""
        return self.measured(images, targets)[0]


class Outputs(Form):
    """Network with `losses` and `detections`."""

    def measured(self, images: Any, targets: Sequence[Target]) -> tuple[Tensor, Sequence[Found]]:
        outputs = self.model(images)
        return self.inner.losses(outputs, targets), () if self.model.training else self.inner.detections(outputs)


class Torchvision(Form):
    """Detector of torchvision, whose losses in evaluation take a second pass."""

    def loss(self, images: Any, targets: Sequence[Target]) -> Tensor:
        with _giving_losses(self.model):
            losses = self.model([*images], [*targets])
        if not isinstance(losses, Mapping) or not losses:
            raise BatchError(
                f"a detector with `targets` in its forward must return a dict of losses in training, "
                f"not {kind(losses)}."
            )
        return torch.stack([each.sum() for each in losses.values()]).sum()

    def measured(self, images: Any, targets: Sequence[Target]) -> tuple[Tensor, Sequence[Found]]:
        return self.loss(images, targets), self.model([*images])


class Transformers(Form):
    """Detector of transformers; another runtime computes no loss for it."""

    def measured(self, images: Any, targets: Sequence[Target]) -> tuple[Tensor, Sequence[Found]]:
        answer = self._answer(images, targets)
        loss = own_loss(answer)
        loss = torch.tensor(math.nan) if loss is None else loss
        if self.model.training:
            return loss, ()
        if isinstance(answer, Tensor):  # of another runtime, see `outputs_of`
            answer = SimpleNamespace(logits=answer[..., :-4], pred_boxes=answer[..., -4:])
        answer.logits, answer.pred_boxes = answer.logits.float(), answer.pred_boxes.float()
        sizes = [tuple(images.shape[-2:])] * len(images)
        return loss, _processor(self.inner.config).post_process_object_detection(
            answer, threshold=0.0, target_sizes=sizes
        )

    def _answer(self, images: Any, targets: Sequence[Target]) -> Any:
        if not isinstance(images, Tensor):
            raise BatchError(
                f"a detector of transformers needs images of one size in a tensor, not {kind(images)}; resize them."
            )
        sides = images.new_tensor([images.shape[-1], images.shape[-2]]).repeat(2)
        labels = [{"class_labels": each["labels"], "boxes": _centred(each["boxes"]) / sides} for each in targets]
        return self.model(pixel_values=images, labels=labels)


@dataclass(frozen=True)
class Ultralytics(Form):
    """YOLO of ultralytics, whose class 0 has the label 1; another runtime computes no loss for it."""

    def __post_init__(self) -> None:
        if not hasattr(getattr(self.inner, "args", None), "box"):  # the loss reads the weights of its parts there
            from ultralytics.cfg import get_cfg

            self.inner.args = get_cfg()

    def loss(self, images: Any, targets: Sequence[Target]) -> Tensor:
        return self._mean(self.model(self._batch(images, targets))[0], targets)

    def measured(self, images: Any, targets: Sequence[Target]) -> tuple[Tensor, Sequence[Found]]:
        from ultralytics.utils.nms import non_max_suppression

        if self.model.training:
            return self.loss(images, targets), ()
        batch, answer, loss = self._batch(images, targets), self.model(images), torch.tensor(math.nan)
        if not isinstance(answer, Tensor):  # else of another runtime, see `outputs_of`
            loss = self._mean(self.inner.loss(batch, answer)[0], targets)
        options = {"conf_thres": 0.001, "iou_thres": 0.7, "multi_label": True, "max_time_img": math.inf}
        rows = non_max_suppression(outputs_of(answer).clone(), **options, end2end=self.inner.end2end)
        return loss, [{"boxes": each[:, :4], "scores": each[:, 4], "labels": each[:, 5].long() + 1} for each in rows]

    def _batch(self, images: Any, targets: Sequence[Target]) -> dict[str, Any]:
        if not isinstance(images, Tensor):
            raise BatchError(f"a YOLO needs images of one size in a tensor, not {kind(images)}; resize them.")
        labels, most = torch.cat([each["labels"] for each in targets]), int(self.inner.model[-1].nc)
        if len(labels) and not 1 <= int(labels.min()) <= int(labels.max()) <= most:
            raise BatchError(
                f"a YOLO of {most} classes needs labels from 1 to {most}, as its class 0 has the label 1, found labels "
                f"from {int(labels.min())} to {int(labels.max())}; build it for other classes, or renumber the labels."
            )
        sides = images.new_tensor([images.shape[-1], images.shape[-2]]).repeat(2)
        places = torch.arange(len(targets), device=images.device)
        return {
            "img": images,
            "batch_idx": places.repeat_interleave(places.new_tensor([len(each["labels"]) for each in targets])),
            "cls": labels.to(images)[:, None] - 1,
            "bboxes": torch.cat([_centred(each["boxes"]) for each in targets]).to(images) / sides,
        }

    def _mean(self, losses: Tensor, targets: Sequence[Target]) -> Tensor:
        return losses.sum() / len(targets)  # ultralytics returns sums over images


def form_of(model: nn.Module) -> Form:
    """Return a detector by its form; raise `OrchestratorError` if it has none of them."""
    inner: Any = model if hasattr(model, "detections") or hasattr(model, "config") else getattr(model, "network", model)
    takes = inspect.signature(type(model).forward).parameters
    if hasattr(inner, "losses") and hasattr(inner, "detections"):
        return Outputs(model, inner)
    if "targets" in takes:
        return Torchvision(model, inner)
    if "pixel_values" in takes and "labels" in takes:
        return Transformers(model, inner)
    own = any((each.__module__, each.__name__) == YOLO for each in type(inner).__mro__)
    head = type(inner.model[-1]).__name__ if own else ""
    if head in HEADS:  # those for masks, poses and RT-DETR have other losses
        return Ultralytics(model, inner)
    found = type(model).__name__ + (f" with the head {head}" if head else "")
    raise OrchestratorError(
        f"`task` (=detection) needs a detector, not {found}: a network of torchvision.models.detection, "
        "an object detection network of transformers, a YOLO of ultralytics for boxes, one with "
        "`losses(outputs, targets)` and `detections(outputs)`, or model=centernet."
    )


@contextmanager
def _giving_losses(model: nn.Module) -> Iterator[None]:
    """Let a detector in evaluation return losses, while its BatchNorms and dropout stay in evaluation."""
    switched = [] if model.training else [m for m in model.modules() if not isinstance(m, _BatchNorm | _DropoutNd)]
    modes = [module.training for module in switched]
    for module in switched:
        module.training = True
    try:
        yield
    finally:
        for module, mode in zip(switched, modes, strict=True):
            module.training = mode


def _centred(boxes: Tensor) -> Tensor:
    """Return boxes as centre and size."""
    return torch.cat([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]], 1)


def _processor(config: Any) -> Any:
    """Return the image processor of transformers for a network's type."""
    from transformers.models.auto import image_processing_auto as auto

    named: Mapping[str, Any] = auto.IMAGE_PROCESSOR_MAPPING_NAMES
    names = named.get(PROCESSORS.get(config.model_type, config.model_type)) or {}
    for name in (names.get("pil"), names.get("torchvision")):
        made = auto.get_image_processor_class_from_name(name) if name else None
        if made is not None and hasattr(made, "post_process_object_detection"):
            return made()
    raise OrchestratorError(
        f"`model` (={config.model_type}) has no image processor in transformers that reads its boxes; wrap the network "
        "in a module with `losses(outputs, targets)` and `detections(outputs)`."
    )
