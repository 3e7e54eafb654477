"""Base of the built-in tasks: a forward pass, a loss of outputs and labels, and exact sums over examples."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Self

import torch
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.task import Summed
from orchestrator.workloads.tasks.totals import Totals

Criterion = Callable[[Tensor, Tensor], Tensor]
"""Loss function (outputs, labels) -> loss."""
Observer = Callable[[Totals, Any, Tensor, Tensor], None]
"""(sums to add to, batch, its outputs and labels from `pair`) -> nothing."""


class Supervised(Summed[Totals]):
    """Task with labels. A subclass defines the pair of outputs and labels, and the sums for its metrics."""

    metrics: tuple[Metric, ...]
    numbers = False
    """Whether outputs are real numbers instead of logits of classes."""
    ignore_index = -100
    """Label that is ignored."""

    def __init__(self, default: Criterion) -> None:
        self.default = default
        self.criterion: Criterion | None = None

    def with_loss(self, criterion: Criterion) -> Self:
        """Return this task with another loss, used instead of its own and the model's."""
        found = copy.copy(self)
        found.criterion = criterion
        return found

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss, from the criterion that was set, else from the model, else from the default.

        A mixture of experts that returns the loss of its routers' balance is trained by it, too.
        """
        answer = forms.answer_of(model, batch)
        return self.balanced(self.loss_of(answer, batch), answer, model)

    def loss_of(self, answer: Any, batch: Any) -> Tensor:
        """Return the mean loss for a model's result on `batch`; 0 if all its labels are ignored."""
        labels: Tensor | None
        if self.criterion is None and (own := forms.own_loss(answer)) is not None:
            loss, labels = own.mean(), forms.given_labels(batch)
        else:
            outputs, labels = self.pair(forms.outputs_of(answer), batch)
            criterion = self.criterion or self.default
            loss = criterion(outputs, labels)
            if isinstance(criterion, nn.CrossEntropyLoss) and _is_known_not_nan(loss):
                return loss  # the mean would be NaN if all labels were ignored
        known = None if labels is None else self.known(labels)
        return loss if known is None else _or_zero(loss, known.any())

    def balanced(self, loss: Tensor, answer: Any, model: nn.Module) -> Tensor:
        """Return the loss with the weighted `aux_loss` of a model of transformers, unless the model's loss holds it."""
        inside = self.criterion is None and forms.own_loss(answer) is not None
        found = getattr(answer, "aux_loss", None)
        weight = getattr(getattr(model, "config", None), "router_aux_loss_coef", None)
        if inside or not isinstance(found, Tensor) or weight is None:
            return loss
        return loss + float(weight) * found

    def known(self, labels: Tensor) -> Tensor | None:
        """Return a mask of the labels that are not ignored; None if no label can be, as with real numbers."""
        return None if labels.is_floating_point() else labels != self.ignore_index

    def size(self, batch: Any) -> int:
        """Return the number of examples."""
        return forms.size(batch)

    def counted(self, labels: Tensor, batch: Any) -> Tensor:
        """Return the labels that an evaluation counts; the others are ignored."""
        del batch
        return labels

    def totals(self, model: nn.Module, batches: Iterable[Any], also: Observer | None = None) -> Totals:
        """Return the exact sums over some batches; sums over parts of a split add up to those of the whole.

        Args:
            model: the network.
            batches: the batches.
            also: adds further sums of a batch.
        """
        totals = Totals()
        criterion = unreduced(self.criterion or self.default)
        for batch in batches:
            answer = forms.answer_of(model, batch)
            outputs, labels = self.pair(forms.outputs_of(answer), batch)
            labels = self.counted(labels, batch)
            own = forms.own_loss(answer) if self.criterion is None else None
            losses = (criterion(outputs, labels) if own is None else own).float()
            self.observe(totals, outputs, labels, losses, forms.size(batch))
            if also is not None:
                also(totals, batch, outputs, labels)
        return totals

    @abstractmethod
    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return outputs and labels for the criterion; raise an error if they do not fit the task."""

    @abstractmethod
    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Add the sums of a batch.

        Args:
            totals: the sums to add to.
            outputs: outputs from `pair`.
            labels: labels from `pair`.
            losses: unreduced losses; one value if the criterion, or the model, gives only a mean.
            examples: number of examples in the batch.
        """


def _is_known_not_nan(loss: Tensor) -> bool:
    """Return whether `loss` is known not to be NaN.

    It is never known on a GPU, where the check would wait for the device, nor in a compiled step.
    """
    return loss.device.type == "cpu" and not torch.compiler.is_compiling() and not math.isnan(loss.item())


def _or_zero(loss: Tensor, counts: Tensor) -> Tensor:
    """Return `loss` if `counts` is true, else 0."""
    if counts.device.type == "cpu" and not torch.compiler.is_compiling() and counts:
        return loss  # on the CPU, an `if` is faster than one more operation to differentiate
    return torch.where(counts, loss, 0.0)


def add_examples(totals: Totals, losses: Tensor, count: int) -> None:
    """Add the losses of `count` examples.

    Several values per example are averaged; a single value for the batch counts for each example.
    """
    totals.add("loss", losses.flatten(1).mean(1) if losses.ndim > 1 else losses.expand(count))
    totals.count("examples", count)


def add_places(totals: Totals, losses: Tensor, examples: int, known: Tensor, places: int) -> None:
    """Add losses of tokens or pixels, as float64 sums per example; one value for the batch counts for each known place.

    Args:
        totals: the sums to add to.
        losses: unreduced losses, or one value for the batch.
        examples: number of examples in the batch.
        known: number of places that are not ignored.
        places: number of places in the batch.
    """
    each = losses.double()
    whole = torch.where(known > 0, each.mean() * known, 0.0)  # a mean over no places is NaN
    totals.add("loss", each.view(examples, -1).sum(1) if each.numel() == places else whole.reshape(1))
    totals.count("known", known)


def unreduced(loss: Criterion) -> Criterion:
    """Return the loss with `reduction` set to "none", if it has that attribute, to get one loss per example."""
    if not hasattr(loss, "reduction"):
        return loss
    found = copy.copy(loss)
    found.reduction = "none"
    return found


def misfit(task: str, need: str, found: Tensor, remedy: str) -> forms.BatchError:
    """Return the error for a batch or outputs that a task cannot use."""
    return forms.BatchError(f"`task` (={task}) needs {need}, found {forms.kind(found)}; {remedy}.")


def class_labels(task: str, labels: Tensor) -> Tensor:
    """Return labels as int64 classes; raise `BatchError` for real numbers."""
    if labels.is_floating_point() or labels.is_complex():
        raise misfit(task, "labels that are classes, integers from 0", labels, "pass task=regression for numbers")
    return labels.long()
