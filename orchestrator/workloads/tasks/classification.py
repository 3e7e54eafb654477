"""Classification: cross-entropy and accuracy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks.batch import labels_of
from orchestrator.workloads.tasks.supervised import Supervised, add_examples, class_labels, misfit
from orchestrator.workloads.tasks.totals import Totals

ACCURACY = Metric("accuracy", "%", "higher", margin=0.01, format=".2%")
"""Fraction of examples whose highest output is that of their class."""
TOP5 = Metric("top5", "%", "higher", margin=0.01, format=".2%")
"""Fraction of examples whose class is among the five highest outputs; measured only with more than five classes."""
TOP = 5


class Classification(Supervised):
    """Classification with one class per example: outputs (batch, classes), integer labels (batch,).

    Examples with a negative label are ignored, as with -100 in torch's loss. In training, labels may also have the
    shape and dtype of the outputs: probabilities of classes, as from mixing examples.
    """

    metrics = (ACCURACY, TOP5)

    def __init__(self) -> None:
        super().__init__(nn.CrossEntropyLoss())

    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits and classes, or logits and probabilities."""
        labels = labels_of(batch)
        if labels.dtype == torch.long and outputs.ndim == 2 and labels.shape == outputs.shape[:1]:
            return outputs, labels
        if labels.is_floating_point() and labels.shape == outputs.shape and outputs.ndim == 2:
            return outputs, labels
        labels = class_labels("classification", labels)
        if labels.ndim != 1:
            remedy = "flatten()" if labels.shape[1:].numel() == 1 else "argmax(1) if they are one-hot"
            raise misfit("classification", "integer labels of shape (batch,)", labels, f"return labels.{remedy}")
        if outputs.ndim != 2 or labels.shape != outputs.shape[:1]:
            given = f"with labels of shape (batch,), not {tuple(labels.shape)}"
            remedy = f"{given}; choose another `task`, `model` or `data`"
            raise misfit("classification", "outputs of shape (batch, classes)", outputs, remedy)
        return outputs, labels

    def known(self, labels: Tensor) -> Tensor | None:
        """Return a mask of the labels that are classes; None for probabilities."""
        return None if labels.is_floating_point() else labels >= 0

    def size(self, batch: Any) -> int:
        """Return the number of examples whose label is not ignored."""
        known = self.known(labels_of(batch))
        return super().size(batch) if known is None else int(known.sum())

    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Count hits per class, and hits among the five highest outputs."""
        labels = class_labels("classification", labels)
        known = labels >= 0
        if not known.all():
            losses = losses[known] if losses.shape[:1] == known.shape else losses
            outputs, labels, examples = outputs[known], labels[known], int(known.sum())
        add_examples(totals, losses, examples)
        classes = outputs.shape[1]
        hits = outputs.argmax(1) == labels
        both = torch.bincount(labels * 2 + hits, minlength=2 * classes)  # per class: misses, then hits
        totals.count("by_class", both[: 2 * classes].view(classes, 2))
        if classes > TOP:
            totals.count("hits_of_top", (outputs.topk(TOP, 1).indices == labels.unsqueeze(1)).sum())

    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return loss and accuracies."""
        count, hits = int(totals.counted("examples")), {ACCURACY.name: sum(self.details(totals)["hits"])}
        if len(totals.counted("by_class")) > TOP:
            hits[TOP5.name] = int(totals.counted("hits_of_top"))
        rates = {name: found / count if count else math.nan for name, found in hits.items()}
        return {"loss": totals.mean("loss", "examples"), **rates}

    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return the number of examples per class, the number of hits among them, and the best constant accuracy."""
        by_class = totals.counted("by_class").tolist()
        of = [sum(both) for both in by_class]
        constant = {"constant": max(of) / sum(of)} if any(of) else {}
        return {"hits": [hits for _, hits in by_class], "of": of, **constant}
