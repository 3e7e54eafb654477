"""Knowledge distillation: train on a teacher's outputs as well as on the labels (Hinton et al., arXiv 1503.02531)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.supervised import Criterion, Supervised
from orchestrator.workloads.tasks.task import Measured, Task
from orchestrator.workloads.tasks.task_building import TaskError


def with_teacher(
    task: Task, teacher: nn.Module, weight: float, temperature: float, *, named: str = "dense"
) -> Distilled:
    """Return `task` with a teacher, see `Distilled`; raise `TaskError` if the meaning of its outputs is unknown.

    Args:
        task: the task of the network.
        teacher: the teacher.
        weight, temperature: see `Distilled`.
        named: value of `finetune.teacher`, for the error.
    """
    if not isinstance(task, Supervised):
        raise TaskError(
            f"`finetune.teacher` (={named}) must be null for `task` (={type(task).__name__}), because the meaning of "
            "its outputs is unknown; leave it out, or derive the task from Supervised."
        )
    return Distilled(task, teacher, weight, temperature)


class Distilled:
    """Task with a teacher. Training uses the loss

        (1 - weight) loss + weight T^2 KL(softmax(teacher / T) || softmax(outputs / T))

    over the places whose label is not ignored. If outputs are real numbers instead of classes, the mean squared
    difference from the teacher's outputs replaces T^2 KL. Evaluation does not use the teacher.

    Args:
        task: the task of the network.
        teacher: a network with the same outputs, in evaluation mode and frozen.
        weight: weight of the teacher, in (0, 1].
        temperature: T, above 0.
    """

    def __init__(self, task: Supervised, teacher: nn.Module, weight: float, temperature: float) -> None:
        self._task, self._teacher, self._weight, self._temperature = task, teacher, weight, temperature

    @property
    def task(self) -> Supervised:
        """Task without the teacher."""
        return self._task

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Metrics of the task."""
        return self._task.metrics

    @property
    def criterion(self) -> Criterion | None:
        """Loss that was set for the task, if any."""
        return self._task.criterion

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss, with the teacher's part."""
        answer = forms.answer_of(model, batch)
        outputs, labels = self._task.pair(forms.outputs_of(answer), batch)
        with torch.no_grad():
            taught = forms.outputs_of(forms.answer_of(self._teacher, batch, labels=False))
            taught, _ = self._task.pair(taught, batch)
        own = self._task.balanced(self._task.loss_of(answer, batch), answer, model)
        return (1 - self._weight) * own + self._weight * self._difference(outputs, taught, labels)

    def size(self, batch: Any) -> int:
        """Return the weight of a batch's mean."""
        return self._task.size(batch)

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured | Mapping[str, float]:
        """Return the loss and the metrics of the task, without the teacher."""
        return self._task.measure(model, batches)

    def _difference(self, outputs: Tensor, taught: Tensor, labels: Tensor) -> Tensor:
        if self._task.numbers:
            return F.mse_loss(outputs, taught)
        temperature = self._temperature
        mine, theirs = ((each.float() / temperature).log_softmax(1) for each in (outputs, taught))
        each = F.kl_div(mine, theirs, log_target=True, reduction="none").sum(1)
        known = self._task.known(labels)
        counted = each if known is None else each[known]
        return temperature**2 * (counted.mean() if len(counted) else counted.sum())
