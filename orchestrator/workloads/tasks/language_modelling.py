"""Language modelling: cross-entropy per token, and perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.supervised import Supervised, add_places, class_labels, misfit
from orchestrator.workloads.tasks.totals import Totals

PERPLEXITY = Metric("perplexity", "", "lower", margin=0.1, format=".3f")
"""exp of the mean cross-entropy per token."""
CROSS_ENTROPY = Metric("cross_entropy", "nats", "lower", margin=0.01, format=".4f")
"""Mean cross-entropy per token, whichever loss the training uses."""
IGNORED = -100
"""Label of targets that are ignored."""
LARGEST = 700.0
"""Cross-entropy from which perplexity is reported as infinite."""


class LanguageModelling(Supervised):
    """Prediction of the next token: outputs (batch, length, tokens), and a batch in one of these forms:

    - a pair (inputs, targets), both (batch, length) of integers: `targets[:, t]` follows `inputs[:, t]`;
    - a dict or an object with labels under one of the names in `LABELS`, at the places of their tokens. They are
      shifted here, as in Hugging Face. Without labels, a dict's `input_ids` are the labels where `attention_mask` is 1;
    - the tokens alone, as one tensor.

    Targets of -100 are ignored. All figures are per token: a batch counts by its number of targets.
    """

    metrics = (PERPLEXITY, CROSS_ENTROPY)

    def __init__(self) -> None:
        super().__init__(nn.CrossEntropyLoss(ignore_index=IGNORED))

    def size(self, batch: Any) -> int:
        """Return the number of targets."""
        return int((_targets(batch)[0] != IGNORED).sum())

    def pair(self, outputs: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Return logits (places, tokens), and the next token at each place (places,)."""
        labels, shifted = _targets(batch)
        if outputs.ndim == 3 and shifted:
            outputs = outputs[:, :-1]
        if outputs.ndim != 3 or outputs.shape[:2] != labels.shape:
            need = f"outputs of shape (batch, length, tokens) for targets of shape {tuple(labels.shape)}"
            raise misfit("language_modelling", need, outputs, "choose another `task`, `model` or `data`")
        return outputs.flatten(0, 1), labels.flatten()

    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Add the cross-entropies of tokens, and the training losses."""
        add_places(totals, losses, examples, (labels != IGNORED).sum(), labels.numel())
        each = F.cross_entropy(outputs.float(), labels, ignore_index=IGNORED, reduction="none")
        totals.add("cross_entropy", each.double().view(examples, -1).sum(1))

    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return loss, perplexity and cross-entropy."""
        mean = totals.mean("cross_entropy", "known")
        perplexity = math.exp(mean) if mean < LARGEST else math.inf
        return {"loss": totals.mean("loss", "known"), PERPLEXITY.name: perplexity, CROSS_ENTROPY.name: mean}

    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return the number of tokens that were not ignored."""
        return {"tokens": int(totals.counted("known"))}


def _targets(batch: Any) -> tuple[Tensor, bool]:
    """Return the targets, and whether they are tokens that this function shifted."""
    if isinstance(batch, list | tuple) and len(batch) > 1:
        return class_labels("language_modelling", forms.labels_of(batch)), False
    tokens = batch if isinstance(batch, Tensor) else forms.given_labels(batch)
    if tokens is None and isinstance(batch, Mapping):
        tokens = batch.get("input_ids")
        if isinstance(tokens, Tensor) and "attention_mask" in batch:
            tokens = tokens.masked_fill(batch["attention_mask"] == 0, IGNORED)
    elif tokens is None:
        tokens = next(forms.tensors(batch), None)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        raise forms.BatchError(
            f"`task` (=language_modelling) needs tokens of shape (batch, length), found {forms.kind(batch)}; return "
            "them as one tensor, as a pair (inputs, targets), or as `input_ids` of a dict."
        )
    return class_labels("language_modelling", tokens)[:, 1:], True
