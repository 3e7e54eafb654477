"""What the built-in tasks share: a forward pass, a loss of outputs and labels, and exact sums over examples."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.task import Measured
from orchestrator.workloads.tasks.totals import Totals

Criterion = Callable[[Tensor, Tensor], Tensor]
"""(outputs, labels) -> loss."""


class Supervised(ABC):
    """A task with labels. Subclasses say what a pair of outputs and labels is, and what is counted of it."""

    metrics: tuple[Metric, ...]
    numbers = False
    """Whether outputs are numbers, and no logits of classes."""
    ignore_index = -100
    """The label that counts for nothing."""

    def __init__(self, default: Criterion) -> None:
        self.default = default
        self.criterion: Criterion | None = None

    def with_loss(self, criterion: Criterion) -> Self:
        """Return this task with another loss in place of its own, and of the model's."""
        found = copy.copy(self)
        found.criterion = criterion
        return found

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss: the criterion's that was given, else the model's own, else that of the task."""
        return self.loss_of(forms.answer_of(model, batch), batch)

    def loss_of(self, answer: Any, batch: Any) -> Tensor:
        """Return the mean loss of what a model returned for `batch`; 0 where none of its labels counts."""
        labels: Tensor | None
        if self.criterion is None and (own := forms.own_loss(answer)) is not None:
            loss, labels = own.mean(), forms.given_labels(batch)
        else:
            outputs, labels = self.pair(forms.outputs_of(answer), batch)
            criterion = self.criterion or self.default
            loss = criterion(outputs, labels)
            if isinstance(criterion, nn.CrossEntropyLoss) and _is_number(loss):
                return loss  # of labels none of which counts, its mean is NaN
        known = None if labels is None else self.known(labels)
        return loss if known is None else _or_zero(loss, known.any())

    def known(self, labels: Tensor) -> Tensor | None:
        """Return which labels count, of their shape; None where all do, as numbers and probabilities."""
        return None if labels.is_floating_point() else labels != self.ignore_index

    def size(self, batch: Any) -> int:
        """Return the number of examples."""
        return forms.size(batch)

    def totals(self, model: nn.Module, batches: Iterable[Any]) -> Totals:
        """Return the exact sums of some batches; those of all batches are the sum of these."""
        totals = Totals()
        criterion = unreduced(self.criterion or self.default)
        for batch in batches:
            answer = forms.answer_of(model, batch)
            outputs, labels = self.pair(forms.outputs_of(answer), batch)
            own = forms.own_loss(answer) if self.criterion is None else None
            losses = (criterion(outputs, labels) if own is None else own).float()
            self.observe(totals, outputs, labels, losses, forms.size(batch))
        return totals

    def measure(self, model: nn.Module, batches: Iterable[Any]) -> Measured:
        """Return `loss` and every metric over all of `batches`."""
        totals = self.totals(model, batches)
        return Measured(self.figures(totals), self.details(totals))

    @abstractmethod
    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return outputs and labels as the criterion takes them; raise for what does not fit the task."""

    @abstractmethod
    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Add what the figures of a batch are made of.

        Args:
            losses: what the criterion gives unreduced; one value where it, or the model, gives a mean.
        """

    @abstractmethod
    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return `loss` and the metrics."""

    @abstractmethod
    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return what is no single number."""


def _is_number(loss: Tensor) -> bool:
    """Tell whether `loss` is known not to be NaN: a device would be waited for to know, and a compiled step cannot."""
    return loss.device.type == "cpu" and not torch.compiler.is_compiling() and not math.isnan(loss.item())


def _or_zero(loss: Tensor, counts: Tensor) -> Tensor:
    """Return `loss` where `counts` is true, else 0."""
    if counts.device.type == "cpu" and not torch.compiler.is_compiling() and counts:
        return loss  # an `if` takes less time than one more operation to differentiate; on a device it would wait
    return torch.where(counts, loss, 0.0)


def add_examples(totals: Totals, losses: Tensor, count: int) -> None:
    """Add losses of `count` examples: many values of one are their mean, one of a batch counts for each example."""
    totals.add("loss", losses.flatten(1).mean(1) if losses.ndim > 1 else losses.expand(count))
    totals.count("examples", count)


def add_places(totals: Totals, losses: Tensor, examples: int, known: Tensor, places: int) -> None:
    """Add losses of tokens or pixels, float64 sums by example; one of a batch counts for each that is `known`.

    Args:
        known: how many of the `places` count.
    """
    each = losses.double()
    whole = torch.where(known > 0, each.mean() * known, 0.0)  # a mean over no places is NaN
    totals.add("loss", each.view(examples, -1).sum(1) if each.numel() == places else whole.reshape(1))
    totals.count("known", known)


def unreduced(loss: Criterion) -> Criterion:
    """Return the loss of each example: one with an attribute `reduction` is asked for "none"."""
    if not hasattr(loss, "reduction"):
        return loss
    found = copy.copy(loss)
    found.reduction = "none"
    return found


def misfit(task: str, need: str, found: Tensor, remedy: str) -> forms.BatchError:
    """Return the error of a batch or outputs that a task cannot use."""
    return forms.BatchError(f"`task` (={task}) needs {need}, found {forms.kind(found)}; {remedy}.")


def class_labels(task: str, labels: Tensor) -> Tensor:
    """Return labels that are classes; raise for numbers."""
    if labels.is_floating_point() or labels.is_complex():
        raise misfit(task, "labels that are classes, integers from 0", labels, "pass task=regression for numbers")
    return labels.long()
