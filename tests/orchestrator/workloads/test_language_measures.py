"""Measures of language modelling on test splits, by hand on tiny vocabularies."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.errors import DataError
from orchestrator.workloads.data_sets.codecs import Bytes, Characters
from orchestrator.workloads.tasks.batch import BatchError
from orchestrator.workloads.tasks.language import held_out_windows
from orchestrator.workloads.tasks.language.language_modelling import LanguageModelling
from orchestrator.workloads.tasks.language.last_words import last_word
from orchestrator.workloads.tasks.task import TestInputs as Inputs

CPU = torch.device("cpu")
TEXT = torch.tensor([0, 1, 2, 0, 1, 2, 2, 0, 1])
"""Nine tokens of three: two blocks of four, each with the token that follows."""


class Bigram(nn.Module):
    """Model whose logits depend on the last token only, and on how many tokens it has read if `by_place`."""

    def __init__(self, table: list[list[float]], by_place: float = 0.0) -> None:
        super().__init__()
        self.table, self.by_place = torch.tensor(table).log(), by_place

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], dtype=torch.float32)
        found: Tensor = self.table[tokens] * (1 + self.by_place * places)[:, None]
        return found


DENSE = Bigram([[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.5, 0.25, 0.25]])
PRUNED = Bigram([[0.2, 0.5, 0.3], [0.6, 0.2, 0.2], [0.5, 0.25, 0.25]])


def blocks(length: int, batch: int = 10) -> list[tuple[Tensor, Tensor]]:
    count = (len(TEXT) - 1) // length
    inputs, targets = (TEXT[start : start + count * length].view(count, length) for start in (0, 1))
    return list(zip(inputs.split(batch), targets.split(batch), strict=True))


def measured(model: nn.Module, batches: Any, dense: nn.Module | None = None, **options: Any) -> Any:
    codec = options.pop("codec", None)
    return LanguageModelling(**options).measure_test(model, batches, Inputs(CPU, 4, dense, codec))


def losses() -> list[float]:
    """Return -log q of each target under DENSE."""
    return [-math.log(DENSE.table[a].exp()[b].item()) for a, b in pairwise(TEXT)]


@pytest.mark.parametrize("batch", [1, 10])
def test_the_papers_leave_out_the_last_prediction_of_each_window(batch: int) -> None:
    each = losses()
    ours, papers = (measured(DENSE, blocks(4, batch), protocol=name) for name in ("blocks", "papers"))

    assert ours.figures["cross_entropy"] == pytest.approx(sum(each) / 8)
    assert papers.figures["cross_entropy"] == pytest.approx(sum(each[:3] + each[4:7]) / 6)
    assert papers.figures["perplexity"] == pytest.approx(math.exp(papers.figures["cross_entropy"]))
    assert papers.details["tokens"] == 6
    assert papers.details["windows"]["tokens"] == [3, 3]
    assert papers.details["windows"]["loss"] == pytest.approx([sum(each[:3]), sum(each[4:7])], abs=1e-4)
    shifted = measured(
        DENSE, [TEXT[:8].view(2, 4)], protocol="blocks"
    )  # whole windows of tokens, as the papers cut them
    assert shifted.figures["cross_entropy"] == pytest.approx(papers.figures["cross_entropy"])


def test_the_papers_protocol_does_not_change_the_training_loss() -> None:
    (batch,) = blocks(4)

    assert LanguageModelling(protocol="papers").loss(DENSE, batch).item() == pytest.approx(sum(losses()) / 8)


@pytest.mark.parametrize(
    ("stride", "lengths"),
    [
        (4, [1, 2, 3, 4, 1, 2, 3, 4]),
        (2, [1, 2, 3, 4, 3, 4, 3, 4]),
        (1, [1, 2, 3, 4, 4, 4, 4, 4]),
        (3, [1, 2, 3, 4, 2, 3, 4, 4]),
    ],
)
@pytest.mark.parametrize("batch", [1, 10])
def test_strided_windows_predict_each_token_once_after_the_tokens_they_have(
    stride: int, lengths: list[int], batch: int
) -> None:
    model = Bigram(DENSE.table.exp().tolist(), by_place=0.5)
    by_hand = [
        -torch.log_softmax(DENSE.table[a] * (1 + 0.5 * (read - 1)), 0)[b].item()
        for a, b, read in zip(TEXT[:-1], TEXT[1:], lengths, strict=True)
    ]
    found = measured(model, blocks(4, batch), stride=stride).figures

    assert math.log(found["strided_perplexity"]) == pytest.approx(sum(by_hand) / 8, rel=1e-6)
    assert (found["strided_perplexity"] == pytest.approx(found["perplexity"], rel=1e-9)) == (stride == 4)


@pytest.mark.parametrize(
    ("batches", "stride", "said"),
    [
        (blocks(4), 5, r"`task.stride` \(=5\) must be at most 4, the tokens of an example \(`data.block`\)"),
        ([(each[0].flip(0), each[1].flip(0)) for each in blocks(4)], 2, "needs examples that follow each other"),
        ([TEXT[:8].view(2, 4)], 2, r"needs batches \(inputs, targets\) of text"),
    ],
)
def test_windows_that_cannot_overlap_are_refused(batches: Any, stride: int, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        measured(DENSE, batches, stride=stride)


@pytest.mark.parametrize("batch", [1, 10])
def test_divergence_and_agreement_are_by_token(batch: int) -> None:
    found = measured(PRUNED, blocks(4, batch), DENSE, against_dense=True).figures
    q, p = (model.table.exp() for model in (DENSE, PRUNED))
    by_token = [sum((q[a] * (q[a] / p[a]).log()).tolist()) for a in TEXT[:-1]]

    assert found["kl_from_dense"] == pytest.approx(sum(by_token) / 8, rel=1e-5)
    assert found["agreement_with_dense"] == 6 / 8  # the two networks differ after token 1, which occurs twice
    same = measured(DENSE, blocks(4), DENSE, against_dense=True).figures
    assert (same["kl_from_dense"], same["agreement_with_dense"]) == (0, 1)
    assert "kl_from_dense" not in measured(DENSE, blocks(4), None, against_dense=True).figures


def test_ignored_targets_are_in_no_figure() -> None:
    (inputs, targets), each = blocks(4)[0], losses()
    targets = targets.clone()
    targets[0, :2] = -100
    found = measured(PRUNED, [(inputs, targets)], DENSE, against_dense=True)
    ours = measured(DENSE, [(inputs, targets)])

    assert found.figures["agreement_with_dense"] == 5 / 6
    assert ours.details["windows"]["tokens"] == [2, 4]
    assert ours.details["windows"]["loss"] == pytest.approx([sum(each[2:4]), sum(each[4:])], abs=1e-4)


def test_many_windows_are_held_as_sums_of_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_out_windows, "MOST_WINDOWS", 3)
    each, windows = losses(), measured(DENSE, blocks(1, 3)).details["windows"]

    assert windows["tokens"] == [3, 3, 2]
    assert windows["loss"] == pytest.approx([sum(each[:3]), sum(each[3:6]), sum(each[6:])], abs=1e-4)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("it is a cat. Th", "cat"),
        ("it is a cat ", "cat"),
        ("it is a cat", "a"),
        ("I don't know", "don't"),
        ("and 42, of", "42"),
        ("one", None),
        ("one two", None),
        (". , ; !", None),
        ("a '' b", None),
    ],
)
@pytest.mark.parametrize(
    "codec", [Characters("".join(sorted(set("it is a cat. Th I don't know and 42, of one two;!b")))), Bytes()]
)
def test_the_last_whole_word_is_found(text: str, word: str | None, codec: Any) -> None:
    tokens = codec.encode(text)
    span = last_word(tokens, codec)

    assert (None if span is None else codec.decode(tokens[slice(*span)])) == word


def test_a_last_word_is_right_if_each_of_its_tokens_is_the_most_probable() -> None:
    codec = Characters(" ab")
    windows = [codec.encode(text) for text in (" ab ab b", " ab aa b", "aa     b")]
    batch = tuple(torch.tensor([window[part] for window in windows]) for part in (slice(None, -1), slice(1, None)))
    likes_ab = Bigram([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])  # predicts " ab ab"
    found = measured(likes_ab, [batch], last_word=True, codec=codec)

    assert found.figures["last_word"] == 1 / 2  # "ab" is right, "aa" is wrong, and "aa" of the third begins the window
    assert found.details["last_words"] == 2
    with pytest.raises(DataError, match=r"`task.last_word` \(=true\) needs the text of tokens"):
        measured(likes_ab, [batch], last_word=True)


def test_a_prompt_is_continued_by_the_most_probable_tokens() -> None:
    codec, cycle = Characters(" ab"), Bigram([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
    task = LanguageModelling(prompts=["b", "ab a"], generate=5)

    assert task.generations(cycle, Inputs(CPU, 2, None, codec)) == [
        {"prompt": "b", "text": " ab a"},
        {"prompt": "ab a", "text": "b ab "},
    ]
    assert task.generations(cycle, Inputs(CPU, 2, None, codec, 1))[0] == {"prompt": "b", "text": " "}
    with pytest.raises(DataError, match=r"knows the characters of `data.root`, without 'x'; leave them out"):
        LanguageModelling(prompts=["x"]).generations(cycle, Inputs(CPU, 2, None, codec))
    with pytest.raises(DataError, match=r"`task.prompts` needs the tokens of a text"):
        task.generations(cycle, Inputs(CPU, 2))


def test_what_is_not_asked_for_is_not_a_metric() -> None:
    names = [metric.name for metric in LanguageModelling().metrics]
    asked = LanguageModelling(stride=2, against_dense=True, last_word=True).metrics

    assert names == ["perplexity", "cross_entropy"]
    assert [metric.name for metric in asked[2:]] == [
        *("strided_perplexity", "kl_from_dense", "agreement_with_dense", "last_word")
    ]
    assert set(measured(DENSE, blocks(4)).figures) == {"loss", *names}
