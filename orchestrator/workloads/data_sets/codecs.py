"""Codecs: texts to tokens and back, for characters, bytes and files of the package tokenizers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from orchestrator.core.errors import DataError

SHOWN = 10
"""Maximum number of unknown characters that a message names."""


class Codec(Protocol):
    """Conversion between a text and its tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens; raise `DataError` if it has none."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens; bytes that are no text become U+FFFD."""
        ...


@dataclass(frozen=True)
class Characters:
    """Codec whose token t is the character `letters[t]`."""

    letters: str

    def encode(self, text: str) -> list[int]:
        """Return a token for each character; raise `DataError` for a character that is not in `letters`."""
        number = {letter: token for token, letter in enumerate(self.letters)}
        if unknown := list(dict.fromkeys(letter for letter in text if letter not in number)):
            more = f" and {len(unknown) - SHOWN} more" if len(unknown) > SHOWN else ""
            listed = " ".join(map(repr, unknown[:SHOWN]))
            raise DataError(
                f"`data.tokenizer` (=characters) knows the characters of `data.root`, without {listed}{more}; leave "
                "them out, or pass data.tokenizer=bytes."
            )
        return [number[letter] for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters; a token beyond `letters` becomes U+FFFD."""
        return "".join(self.letters[token] if token < len(self.letters) else "\ufffd" for token in tokens)


@dataclass(frozen=True)
class Bytes:
    """Codec whose tokens are the bytes of the text in UTF-8."""

    def encode(self, text: str) -> list[int]:
        """Return the bytes."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the bytes."""
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


@dataclass(frozen=True)
class Tokenizer:
    """Codec of the package tokenizers.

    Args:
        loaded: a `tokenizers.Tokenizer`.
    """

    loaded: Any

    def encode(self, text: str) -> list[int]:
        """Return the tokens of the text."""
        return list(self.loaded.encode(text, add_special_tokens=False).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return str(self.loaded.decode(list(tokens), skip_special_tokens=False))
