"""Language modelling: cross-entropy per token, perplexity, and what is measured besides them on test splits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.catalogue.tasks import (
    AGREEMENT,
    KL_FROM_DENSE,
    LAST_WORD,
    PASSAGE_LAST_WORD,
    PASSAGE_PERPLEXITY,
    STRIDED_PERPLEXITY,
)
from orchestrator.core.errors import DataError
from orchestrator.core.metrics import Metric
from orchestrator.workloads.tasks import batch as forms
from orchestrator.workloads.tasks.batch import answer_of, outputs_of
from orchestrator.workloads.tasks.held_out_windows import WindowSums, add_comparison, strided_windows
from orchestrator.workloads.tasks.last_words import add_last_words, add_last_words_of, read_passages
from orchestrator.workloads.tasks.supervised import Supervised, add_places, class_labels, misfit
from orchestrator.workloads.tasks.task import Measured, TestInputs
from orchestrator.workloads.tasks.totals import Totals


def greedy_generations(
    model: nn.Module, prompts: Sequence[str], count: int, inputs: TestInputs
) -> list[dict[str, str]]:
    """Return `prompt` and `text` for each prompt: its continuation by `count` tokens.

    The network reads the last `inputs.length` tokens, so each step costs a forward pass.

    Raises:
        DataError: the data have no codec, or a prompt has no tokens
    """
    if prompts and inputs.codec is None:
        raise DataError(
            "`task.prompts` needs the tokens of a text; use data=text, or return a `codec` with `encode` and `decode` "
            "from the data target."
        )
    return [{"prompt": prompt, "text": _continued(model, prompt, count, inputs)} for prompt in prompts]


def _continued(model: nn.Module, prompt: str, count: int, inputs: TestInputs) -> str:
    assert inputs.codec is not None
    try:
        tokens = inputs.codec.encode(prompt)
    except DataError as error:
        raise DataError(f"`task.prompts` (={prompt!r}) {error}") from None
    if not tokens:
        raise DataError(f"`task.prompts` (={prompt!r}) must have at least one token; pass a text.")
    start = len(tokens)
    for _ in range(count):
        read = torch.tensor([tokens[-inputs.length :]], device=inputs.device)
        tokens.append(int(outputs_of(answer_of(model, read))[0, -1].argmax()))
    return inputs.codec.decode(tokens)[len(inputs.codec.decode(tokens[:start])) :]


PERPLEXITY = Metric("perplexity", "", "lower", margin=0.1, format=".3f")
"""exp of the mean cross-entropy per token."""
CROSS_ENTROPY = Metric("cross_entropy", "nats", "lower", margin=0.01, format=".4f")
"""Mean cross-entropy per token, whichever loss the training uses."""
STRIDED = Metric(STRIDED_PERPLEXITY, "", "lower", margin=0.1, format=".3f")
"""Perplexity of the same tokens by windows that overlap."""
DIVERGENCE = Metric(KL_FROM_DENSE, "nats", "lower", margin=0.01, format=".4f")
"""Mean Kullback-Leibler divergence of the network's predictions from the dense network's, per token."""
AGREED = Metric(AGREEMENT, "%", "higher", margin=0.01, format=".2%")
"""Fraction of the tokens for which the network and the dense network find the same token most probable."""
LAST_WORDS = Metric(LAST_WORD, "%", "higher", margin=0.01, format=".2%")
"""Fraction of the windows whose last whole word greedy prediction gets right, token by token."""
PASSAGES = Metric(PASSAGE_LAST_WORD, "%", "higher", margin=0.01, format=".2%")
"""Fraction of the passages in a file whose last word greedy prediction gets right, token by token."""
WORD_PERPLEXITY = Metric(PASSAGE_PERPLEXITY, "", "lower", margin=0.1, format=".3f")
"""exp of the mean of -log p(last word), over the passages in a file."""
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

    Args:
        protocol: `blocks` counts every target; `papers` leaves out the last target of each pair, so that a window of L
            tokens has L - 1 predictions.
        stride: tokens between the starts of overlapping windows, for the strided perplexity; None does not measure it.
        against_dense: whether pruned networks are compared with the dense network on the test splits.
        last_word: whether the last whole words of the windows are predicted.
        passages: file of passages whose last words are predicted, once for all test splits; None measures none.
        prompts: texts that the network continues.
        generate: tokens of each continuation.
        content: SHA-256 that the file of passages must have; None accepts any file.
    """

    def __init__(
        self,
        protocol: str = "blocks",
        stride: int | None = None,
        against_dense: bool = False,
        last_word: bool = False,
        prompts: Sequence[str] = (),
        generate: int = 32,
        passages: str | None = None,
        content: str | None = None,
    ) -> None:
        super().__init__(nn.CrossEntropyLoss(ignore_index=IGNORED))
        self._protocol, self._stride, self._prompts, self._generate = protocol, stride, prompts, generate
        self._compares, self._completes = against_dense, last_word
        self._passages, self._content = passages, content
        asked = {STRIDED: stride is not None, DIVERGENCE: against_dense, AGREED: against_dense, LAST_WORDS: last_word}
        asked |= dict.fromkeys((PASSAGES, WORD_PERPLEXITY), passages is not None)
        self.metrics = (PERPLEXITY, CROSS_ENTROPY, *(metric for metric, wanted in asked.items() if wanted))

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

    def counted(self, labels: Tensor, batch: Any) -> Tensor:
        """Return the labels that an evaluation counts: in the papers' protocol, without the last of each pair."""
        targets, shifted = _targets(batch)
        if shifted or self._protocol == "blocks":
            return labels
        whole = labels.view(targets.shape).clone()
        whole[:, -1] = IGNORED
        return whole.flatten()

    def observe(self, totals: Totals, outputs: Tensor, labels: Tensor, losses: Tensor, examples: int) -> None:
        """Add the cross-entropies of tokens, and the training losses."""
        add_places(totals, losses, examples, (labels != IGNORED).sum(), labels.numel())
        each = F.cross_entropy(outputs.float(), labels, ignore_index=IGNORED, reduction="none")
        totals.add("cross_entropy", each.double().view(examples, -1).sum(1))

    def figures(self, totals: Totals) -> Mapping[str, float]:
        """Return loss, perplexity and cross-entropy, and the other metrics that the sums have."""
        mean = totals.mean("cross_entropy", "known")
        found = {"loss": totals.mean("loss", "known"), PERPLEXITY.name: _perplexity(mean), CROSS_ENTROPY.name: mean}
        if totals.has("strided"):
            found[STRIDED.name] = _perplexity(totals.mean("strided", "strided_known"))
        if totals.has("divergence"):
            found[DIVERGENCE.name] = totals.mean("divergence", "known")
            found[AGREED.name] = totals.rate("agreed", "known")
        if totals.has("last_words"):
            found[LAST_WORDS.name] = totals.rate("right_last_words", "last_words")
        if totals.has("passages"):
            found[PASSAGES.name] = totals.rate("right_passages", "passages")
            found[WORD_PERPLEXITY.name] = _perplexity(totals.mean("passage_losses", "passages"))
        return found

    def details(self, totals: Totals) -> Mapping[str, Any]:
        """Return the number of tokens that were not ignored, of windows with a last word, and of passages."""
        names = [name for name in ("last_words", "passages", "cut_passages") if totals.has(name)]
        return {"tokens": int(totals.counted("known"))} | {name: int(totals.counted(name)) for name in names}

    def measure_test(self, model: nn.Module, batches: Iterable[Any], inputs: TestInputs) -> Measured:
        """Return all figures on a test split, and the loss of each window."""
        windows = WindowSums(IGNORED)
        totals = self.totals(model, batches, partial(self._observe_test, windows, inputs))
        if self._stride is not None:
            for window, size in strided_windows(batches, self._stride, IGNORED):
                outputs, labels = self.pair(forms.outputs_of(forms.answer_of(model, window)), window)
                each = F.cross_entropy(outputs.float(), labels, ignore_index=IGNORED, reduction="none")
                totals.add("strided", each.double().view(size, -1).sum(1))
                totals.count("strided_known", (labels != IGNORED).sum())
        if self._passages is not None and not inputs.further:
            passages = read_passages(self._passages, self._content, inputs)[: inputs.most_passages]
            add_last_words_of(totals, model, passages, inputs)
        return Measured(self.figures(totals), {**self.details(totals), "windows": windows.details()})

    def _observe_test(
        self, windows: WindowSums, inputs: TestInputs, totals: Totals, batch: Any, outputs: Tensor, labels: Tensor
    ) -> None:
        """Add what is measured on test splits only."""
        targets = _targets(batch)[0]
        shape = targets.shape
        windows.add(outputs, labels.view(shape))
        if inputs.dense is not None and self._compares:
            theirs, _ = self.pair(forms.outputs_of(forms.answer_of(inputs.dense, batch, labels=False)), batch)
            add_comparison(totals, outputs.view(*shape, -1), theirs.view(*shape, -1), labels.view(shape) != IGNORED)
        if self._completes:
            add_last_words(totals, outputs.argmax(1).view(shape), targets, inputs.codec)

    def generations(self, model: nn.Module, inputs: TestInputs) -> list[dict[str, str]]:
        """Return the greedy continuation of each prompt."""
        count = self._generate if inputs.most_tokens is None else min(self._generate, inputs.most_tokens)
        return greedy_generations(model, self._prompts, count, inputs)


def _perplexity(mean: float) -> float:
    return math.exp(mean) if mean < LARGEST else math.inf


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
