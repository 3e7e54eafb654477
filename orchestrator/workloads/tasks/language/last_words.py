"""Last words: greedy prediction of the last whole word of each window (Paperno et al., arXiv 1606.06031)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.workloads.data_sets.codecs import Codec
from orchestrator.workloads.tasks.totals import Totals

IN_WORDS = "'\u2019\ufffd"
"""Characters of words besides letters and digits: apostrophes, and parts of a character whose token is incomplete."""


def add_last_words(totals: Totals, predicted: Tensor, targets: Tensor, codec: Codec | None) -> None:
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


def last_word(tokens: Sequence[int], codec: Codec) -> tuple[int, int] | None:
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


def _piece(tokens: Sequence[int], place: int, codec: Codec) -> str:
    """Return the text that a token adds to the text of the token before it."""
    before = codec.decode(tokens[place - 1 : place]) if place else ""
    return codec.decode(tokens[max(0, place - 1) : place + 1])[len(before) :]


def _continues(before: str, piece: str) -> bool:
    """Whether a token belongs to the word of the token before it."""
    return _is_word(before) and _is_word(piece) and not (before[-1:].isspace() or piece[:1].isspace())


def _is_word(piece: str) -> bool:
    text = piece.strip()
    return bool(text or not piece) and all(letter.isalnum() or letter in IN_WORDS for letter in text)
