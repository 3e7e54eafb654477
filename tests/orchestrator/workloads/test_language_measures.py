"""Measures of language modelling on test splits, by hand on tiny vocabularies."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.core.errors import DataError
from orchestrator.workloads.data_sets.text import ByteCodec, Characters
from orchestrator.workloads.tasks import held_out_windows
from orchestrator.workloads.tasks.batch import BatchError
from orchestrator.workloads.tasks.language_modelling import LanguageModelling
from orchestrator.workloads.tasks.last_words import last_word
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
    "codec", [Characters("".join(sorted(set("it is a cat. Th I don't know and 42, of one two;!b")))), ByteCodec()]
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


def passages(folder: Path, *texts: str) -> str:
    (folder / "passages.txt").write_text("\n".join(texts))
    return str(folder / "passages.txt")


AFTER = Bigram([[0.1, 0.8, 0.1], [0.3, 0.1, 0.6], [0.5, 0.2, 0.3]])
"""Probabilities of " ", "a" and "b" after each of them: the most probable continuation is " ab ab"."""


@pytest.mark.parametrize("batch", [1, 2, 10])
def test_last_words_of_passages_by_hand(tmp_path: Path, batch: int) -> None:
    path = passages(tmp_path, "b ab ab", "a ba", "ab ab", "ab aab", "b  b")
    inputs = Inputs(CPU, 8, None, Characters(" ab"), batch_size=batch)
    found = LanguageModelling(passages=path).measure_test(AFTER, blocks(4), inputs)
    after_b, a, b = 0.5, 0.8, 0.6  # probabilities of " " after "b", of "a" after " ", and of "b" after "a"
    words = [after_b * a * b, 0.3 * 0.1 * 0.2, after_b * a * b, after_b * a * 0.1 * b, after_b * 0.1 * 0.1]

    assert found.figures["passage_last_word"] == 2 / 5  # " ab" twice; " ba", " aab" and "  b" are wrong
    assert math.log(found.figures["passage_perplexity"]) == pytest.approx(-math.log(math.prod(words)) / 5, rel=1e-6)
    assert (found.details["passages"], found.details["cut_passages"]) == (5, 0)
    assert found.figures["perplexity"] == measured(AFTER, blocks(4)).figures["perplexity"]


@pytest.mark.parametrize("model", [AFTER, Bigram(AFTER.table.exp().tolist(), by_place=0.7)])
def test_the_order_and_the_batches_of_passages_change_no_bit(tmp_path: Path, model: nn.Module) -> None:
    texts = ["b ab ab", "ab ab", "a ba", "bb aa ab ab", "ab aab", "b b b", "ab ba", "a a a ab"]

    def found(order: list[str], batch: int) -> dict[str, float]:
        inputs = Inputs(CPU, 6, None, Characters(" ab"), batch_size=batch)
        task = LanguageModelling(passages=passages(tmp_path, *order))
        return {n: v for n, v in task.measure_test(model, blocks(4), inputs).figures.items() if n.startswith("passage")}

    assert len(found(texts, 1)) == 2
    assert found(texts, 1) == found(texts, 3) == found(texts[::-1], 8)


def test_a_passage_longer_than_a_window_is_cut_at_the_left(tmp_path: Path) -> None:
    model = Bigram(AFTER.table.exp().tolist(), by_place=1.0)  # logits at place t are (1 + t) log p
    inputs = Inputs(CPU, 3, None, Characters(" ab"))
    found = LanguageModelling(passages=passages(tmp_path, "bbbb ab")).measure_test(model, blocks(4), inputs)
    read = [(2, 0), (0, 1), (1, 2)]  # the last three tokens before the end of "bbbb ab", each with the token after it
    by_hand = [-torch.log_softmax(AFTER.table[a] * (1 + at), 0)[b].item() for at, (a, b) in enumerate(read)]

    assert math.log(found.figures["passage_perplexity"]) == pytest.approx(sum(by_hand), rel=1e-6)
    assert (found.details["passages"], found.details["cut_passages"]) == (1, 1)


def test_passages_are_measured_with_the_first_test_split_and_in_part_in_a_preflight(tmp_path: Path) -> None:
    task = LanguageModelling(passages=passages(tmp_path, "b ab", "a ba"))
    inputs = Inputs(CPU, 8, None, Characters(" ab"))

    assert "passage_last_word" not in task.measure_test(AFTER, blocks(4), replace(inputs, further=True)).figures
    assert task.measure_test(AFTER, blocks(4), replace(inputs, most_passages=1)).details["passages"] == 1


class Joined:
    """Codec that joins the last two words of a text into one token."""

    def encode(self, text: str) -> list[int]:
        return list(range(text.count(" ")))


@pytest.mark.parametrize(
    ("codec", "length", "content", "said"),
    [
        (None, 8, None, r"`task.passages` \(=.*\) needs the tokens of a text"),
        (Characters(" ab"), 2, None, r"last words of at most 2 tokens \(`data.block`\) .* 'ab' has 3 of the 4 tokens"),
        (Joined(), 2, None, "'ab' has 1 of the 1 tokens of its passage; leave the passage out"),
        (
            Characters(" a"),
            8,
            None,
            r"`task.passages` \(=.*\) must have only characters of `data.root`, as .* is characters, but has 'b'",
        ),
        (Characters(" ab"), 8, "0" * 64, "must have the content that the sweep was planned with"),
    ],
)
def test_passages_that_cannot_be_predicted_are_refused(
    tmp_path: Path, codec: Any, length: int, content: str | None, said: str
) -> None:
    task = LanguageModelling(passages=passages(tmp_path, "b ab"), content=content)

    with pytest.raises(DataError, match=said):
        task.measure_test(AFTER, blocks(4), Inputs(CPU, length, None, codec))


def test_a_prompt_is_continued_by_the_most_probable_tokens() -> None:
    codec, cycle = Characters(" ab"), Bigram([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8], [0.8, 0.1, 0.1]])
    task = LanguageModelling(prompts=["b", "ab a"], generate=5)

    assert task.generations(cycle, Inputs(CPU, 2, None, codec)) == [
        {"prompt": "b", "text": " ab a"},
        {"prompt": "ab a", "text": "b ab "},
    ]
    assert task.generations(cycle, Inputs(CPU, 2, None, codec, 1))[0] == {"prompt": "b", "text": " "}
    with pytest.raises(DataError, match=r"`task.prompts` \(='x'\) must have only .*, but has 'x'; leave them out"):
        LanguageModelling(prompts=["x"]).generations(cycle, Inputs(CPU, 2, None, codec))
    with pytest.raises(DataError, match=r"`task.prompts` needs the tokens of a text"):
        task.generations(cycle, Inputs(CPU, 2))


def test_what_is_not_asked_for_is_not_a_metric() -> None:
    names = [metric.name for metric in LanguageModelling().metrics]
    asked = LanguageModelling(stride=2, against_dense=True, last_word=True, passages="lambada.jsonl").metrics

    assert names == ["perplexity", "cross_entropy"]
    assert [metric.name for metric in asked[2:]] == [
        *("strided_perplexity", "kl_from_dense", "agreement_with_dense", "last_word"),
        *("passage_last_word", "passage_perplexity"),
    ]
    assert set(measured(DENSE, blocks(4)).figures) == {"loss", *names}
