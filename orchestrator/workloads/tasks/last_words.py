"""Last whole words of windows and passages: the share right, perplexity (Paperno et al., arXiv 1606.06031)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.errors import DataError
from orchestrator.planning import pinned_content
from orchestrator.planning.file_places import Misplaced, absolute
from orchestrator.workloads.data_sets.text import TextCodec
from orchestrator.workloads.tasks.batch import answer_of, outputs_of
from orchestrator.workloads.tasks.task import TestInputs
from orchestrator.workloads.tasks.totals import Totals


@dataclass(frozen=True)
class Passage:
    """Tokens of a passage.

    Args:
        tokens: all tokens.
        word: number of tokens at the end that belong to the last word.
    """

    tokens: Sequence[int]
    word: int


def read_passages(path: str, content: str | None, inputs: TestInputs) -> list[Passage]:
    """Return the tokens of the passages in a file.

    Args:
        path: a file with one passage a line, or JSON lines with `text`.
        content: SHA-256 that the file must have; None accepts any file.
        inputs: give the codec, and the number of tokens that the network reads.

    Raises:
        DataError: the file cannot be used or has another content, there is no codec, or a last word has no tokens
            before it or too many of its own
    """
    if inputs.codec is None:
        raise DataError(
            f"`task.passages` (={path}) needs the tokens of a text; use data=text, or return a `codec` with `encode` "
            "and `decode` from the data target."
        )
    try:
        texts = pinned_content.passages(path)
        found = pinned_content.place_digest(absolute(path))
    except Misplaced as error:
        raise DataError(f"`task.passages` (={path}) {error}") from None
    if content not in (None, found):
        raise DataError(
            f"`task.passages` (={path}) must have the content that the sweep was planned with, but it has changed, or "
            "this node has another file; run the same command again."
        )
    try:
        passages = [_passage(text, inputs.codec) for text in texts]
    except DataError as error:
        raise DataError(f"`task.passages` (={path}) {error}") from None
    for passage, text in zip(passages, texts, strict=True):
        if not 0 < passage.word <= min(inputs.length, len(passage.tokens) - 1):
            raise DataError(
                f"`task.passages` (={path}) must have last words of at most {inputs.length} tokens (`data.block`) "
                f"after another token, but {text.split()[-1]!r} has {passage.word} of the {len(passage.tokens)} tokens "
                "of its passage; leave the passage out."
            )
    return passages


def add_last_words_of(totals: Totals, model: nn.Module, passages: Sequence[Passage], inputs: TestInputs) -> None:
    """Count the passages, and those in which each token of the last word is the most probable one.

    A batch has passages of one length, so that no padding is read. A longer passage than the network reads is cut at
    the left.

    Args:
        totals: the sums to add to: `passages`, `cut_passages`, `right_passages`, and `passage_losses`, -log p of each
            token of a last word in nats.
        model: the network.
        passages: tokens of the passages.
        inputs: give the device, the size of batches, and the number of tokens that the network reads.
    """
    by_length: dict[int, list[Passage]] = {}
    for passage in passages:
        by_length.setdefault(min(len(passage.tokens) - 1, inputs.length), []).append(passage)
    totals.count("cut_passages", sum(len(passage.tokens) - 1 > inputs.length for passage in passages))
    for length, equally_long in sorted(by_length.items()):
        for start in range(0, len(equally_long), inputs.batch_size):
            _add_batch(totals, model, equally_long[start : start + inputs.batch_size], length, inputs.device)


def _add_batch(totals: Totals, model: nn.Module, batch: Sequence[Passage], length: int, device: torch.device) -> None:
    """Add passages of which the network reads `length` tokens."""
    tokens = torch.tensor([passage.tokens[-length - 1 :] for passage in batch], device=device)
    words = torch.tensor([passage.word for passage in batch], device=device)
    most = max(passage.word for passage in batch)
    outputs = outputs_of(answer_of(model, tokens[:, :-1]))[:, -most:].float()
    targets, in_word = tokens[:, -most:], torch.arange(most, device=device) >= most - words[:, None]
    losses = F.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
    totals.add("passage_losses", losses.double()[in_word])
    totals.count("right_passages", ((outputs.argmax(2) == targets) | ~in_word).all(1).sum())
    totals.count("passages", len(batch))


def _passage(text: str, codec: TextCodec) -> Passage:
    """Return the tokens of a whole passage; those of the last word are behind the tokens that its context has too."""
    tokens, context = codec.encode(text.strip()), codec.encode(text.strip().rsplit(None, 1)[0])
    shared = next((n for n, pair in enumerate(zip(tokens, context, strict=False)) if pair[0] != pair[1]), len(context))
    return Passage(tokens, len(tokens) - min(shared, len(tokens)))


IN_WORDS = "'\u2019\ufffd"
"""Characters of words besides letters and digits: apostrophes, and parts of a character whose token is incomplete."""


def add_last_words(totals: Totals, predicted: Tensor, targets: Tensor, codec: TextCodec | None) -> None:
    """Count the windows with a last word, and those in which every token of it is the most probable one.

    Args:
        totals: the counts to add to, `last_words` and `right_last_words`.
        predicted: most probable token at each place (windows, length).
        targets: tokens that follow (windows, length).
        codec: turns tokens into text.

    Raises:
        DataError: there is no codec.
    """
    if codec is None:
        raise DataError(
            "`task.last_word` (=true) needs the text of tokens; use data=text, or return a `codec` with `encode` and "
            "`decode` from the data target."
        )
    right = (predicted == targets).tolist()
    spans = [last_word(window, codec) for window in targets.tolist()]
    found = [all(hits[slice(*span)]) for hits, span in zip(right, spans, strict=True) if span is not None]
    totals.count("last_words", len(found))
    totals.count("right_last_words", sum(found))


def last_word(tokens: Sequence[int], codec: TextCodec) -> tuple[int, int] | None:
    """Return the start and the end of the last word that another token ends; None if there is none.

    A word is a run of tokens whose text, without spaces around it, consists of letters, digits and apostrophes, and
    that no space divides. It begins after the first token, and holds a letter or a digit.
    """
    pieces = {place: _piece(tokens, place, codec) for place in (len(tokens) - 1,) if place > 0}
    end: int | None = None
    for place in range(len(tokens) - 1, 0, -1):
        if tokens[place] < 0 or tokens[place - 1] < 0:  # an ignored target
            return None
        pieces[place - 1] = _piece(tokens, place - 1, codec)
        if _continues(pieces[place - 1], pieces[place]):
            continue
        if end is not None and any(letter.isalnum() for at in range(place, end) for letter in pieces[at]):
            return place, end
        end = place if _is_word(pieces[place - 1]) else None
    return None


def _piece(tokens: Sequence[int], place: int, codec: TextCodec) -> str:
    """Return the text that a token adds to the text of the token before it."""
    before = codec.decode(tokens[place - 1 : place]) if place else ""
    return codec.decode(tokens[max(0, place - 1) : place + 1])[len(before) :]


def _continues(before: str, piece: str) -> bool:
    """Whether a token belongs to the word of the token before it."""
    return _is_word(before) and _is_word(piece) and not (before[-1:].isspace() or piece[:1].isspace())


def _is_word(piece: str) -> bool:
    text = piece.strip()
    return bool(text or not piece) and all(letter.isalnum() or letter in IN_WORDS for letter in text)
