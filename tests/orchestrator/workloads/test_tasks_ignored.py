"""Ignored labels: in losses, in metrics, with a teacher, and in batches with no other labels."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.distilled import Distilled
from orchestrator.workloads.tasks.language_modelling import LanguageModelling
from orchestrator.workloads.tasks.segmentation import Segmentation
from orchestrator.workloads.tasks.supervised import Supervised

MODEL = nn.Identity()
"""Network whose outputs are its inputs."""


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def mean_of_known(outputs: Tensor, labels: Tensor) -> Tensor:
    """Loss without `reduction`, written as a plain function."""
    return F.cross_entropy(outputs, labels)


@pytest.mark.parametrize("task", [Classification(), Classification().with_loss(mean_of_known)])
def test_examples_that_are_not_labelled_count_for_nothing(task: Classification) -> None:
    logits, labels = drawn(20, 8), torch.arange(20) % 8
    labels[12:] = -100  # whole batches of 4: a batch's mean counts once per known label
    parts = list(zip(logits.split(4), labels.split(4), strict=True))

    whole, known = task.measure(MODEL, parts), task.measure(MODEL, parts[:3])

    assert whole == known
    mixed = logits.flip(0)[6:10], labels.flip(0)[6:10]
    found = Classification().measure(MODEL, [mixed])
    assert found == Classification().measure(MODEL, [(mixed[0][2:], mixed[1][2:])])
    assert task.size(mixed) == 2
    assert task.loss(MODEL, mixed) == F.cross_entropy(*mixed)


def test_a_split_without_a_label_has_no_accuracy() -> None:
    found = Classification().measure(MODEL, [(drawn(3, 8), torch.full((3,), -100))]).figures
    assert all(math.isnan(value) for value in found.values())


BLANK: list[tuple[Supervised, tuple[int, ...], int]] = [
    (Classification(), (4, 3), -100),
    (LanguageModelling(), (4, 5, 3), -100),
    (Segmentation(), (4, 3, 5, 5), 255),
]


@pytest.mark.parametrize(("task", "shape", "ignored"), BLANK)
def test_a_batch_that_is_not_labelled_has_no_loss_and_no_gradient(
    task: Supervised, shape: tuple[int, ...], ignored: int
) -> None:
    outputs = drawn(*shape).requires_grad_()
    labels = outputs.argmax(2 if isinstance(task, LanguageModelling) else 1)
    blank = torch.full_like(labels, ignored)

    loss = task.loss(MODEL, (outputs, blank))
    loss.backward()

    assert (loss.item(), task.size((outputs, blank))) == (0.0, 0)
    assert outputs.grad is not None
    assert not outputs.grad.any()
    of_mean = task.with_loss(lambda found, wanted: F.cross_entropy(found, wanted, ignore_index=ignored))
    for each in (task, of_mean):
        with_blank = each.measure(MODEL, [(outputs.detach(), labels), (outputs.detach(), blank)])
        assert with_blank == each.measure(MODEL, [(outputs.detach(), labels)])


def test_a_models_own_loss_of_nothing_is_none() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
            return {
                "logits": x,
                **({} if labels is None else {"loss": F.cross_entropy(x.flatten(0, 1), labels.flatten())}),
            }

    x = drawn(2, 4, 3).requires_grad_()
    loss = LanguageModelling().loss(Own(), {"x": x, "labels": torch.full((2, 4), -100)})
    assert loss.item() == 0


def test_pixels_that_count_for_nothing_are_not_taught() -> None:
    torch.manual_seed(0)
    student, teacher = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)
    task = Distilled(Segmentation(), teacher, weight=1.0, temperature=1.0)
    images, labels = drawn(1, 3, 4, 4), torch.zeros(1, 4, 4, dtype=torch.long)
    labels[:, :2] = 255

    whole, cut = task.loss(student, (images, labels)), task.loss(student, (images[:, :, 2:], labels[:, 2:]))

    assert whole.item() == pytest.approx(cut.item(), rel=1e-6)
    assert task.loss(student, (images, torch.full_like(labels, 255))).item() == 0
