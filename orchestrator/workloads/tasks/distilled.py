"""Learn what another network answers, beside what the data says (Hinton et al., arXiv 1503.02531)."""

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


def with_teacher(task: Task, teacher: nn.Module, weight: float, temperature: float) -> Distilled:
    """Return `task` with a teacher, see `Distilled`; raise `TaskError` where what its outputs mean is not known."""
    if not isinstance(task, Supervised):
        raise TaskError(
            f"`finetune.teacher` (=dense) must be null for `task` (={type(task).__name__}): what its outputs mean is "
            "not known; leave it out, or derive the task from Supervised."
        )
    return Distilled(task, teacher, weight, temperature)


class Distilled:
    """A task with a teacher: it is measured as it is without one, and trained by

        (1 - weight) loss + weight T^2 KL(softmax(teacher / T) || softmax(outputs / T))

    over the places whose label counts. Outputs that are numbers and no classes are held to the teacher's by their mean
    squared difference instead.

    Args:
        task: what the network is trained for.
        teacher: a network with the same outputs, in evaluation mode and frozen.
        weight: of the teacher, in (0, 1].
        temperature: T, above 0.
    """

    def __init__(self, task: Supervised, teacher: nn.Module, weight: float, temperature: float) -> None:
        self._task, self._teacher, self._weight, self._temperature = task, teacher, weight, temperature

    @property
    def task(self) -> Supervised:
        """What the network is trained for."""
        return self._task

    @property
    def metrics(self) -> tuple[Metric, ...]:
        """Those of the task."""
        return self._task.metrics

    @property
    def criterion(self) -> Criterion | None:
        """The loss that was given to the task."""
        return self._task.criterion

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss, in part that of the teacher's outputs."""
        answer = forms.answer_of(model, batch)
        outputs, labels = self._task.pair(forms.outputs_of(answer), batch)
        with torch.no_grad():
            taught = forms.outputs_of(forms.answer_of(self._teacher, batch, labels=False))
            taught, _ = self._task.pair(taught, batch)
        own = self._task.loss_of(answer, batch)
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
