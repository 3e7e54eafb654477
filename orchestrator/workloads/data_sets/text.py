"""Text data: blocks of tokens with the next token as label, stored once per node in the smallest dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.planning.file_places import GGUF, Misplaced, texts
from orchestrator.planning.number_formats import first_few
from orchestrator.planning.pinned_content import content_of_text, release_of, text_bytes
from orchestrator.workloads import node_cache
from orchestrator.workloads.networks.gguf_files import tokenizer_of
from orchestrator.workloads.splits import TensorSplit

SHOWN = 10
"""Maximum number of unknown characters that a message names."""


class TextCodec(Protocol):
    """Conversion between a text and its tokens."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without special tokens; raise `DataError` if it has none.

        The message continues a sentence that begins with the key and the value of the text.
        """
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
            listed = first_few([*map(repr, unknown)], SHOWN, " ")
            raise DataError(
                f"must have only characters of `data.root`, as `data.tokenizer` is characters, but has {listed}; "
                "leave them out, or pass data.tokenizer=bytes."
            )
        return [number[letter] for letter in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the characters; a token beyond `letters` becomes U+FFFD."""
        return "".join(self.letters[token] if token < len(self.letters) else "\ufffd" for token in tokens)


@dataclass(frozen=True)
class ByteCodec:
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


def text(
    root: str,
    tokenizer: str = "characters",
    block: int = 128,
    test_fraction: float = 0.1,
    tests: Mapping[str, str] | None = None,
    test_size: int | None = None,
    content: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the blocks of a text; its last part is the test split, and no token is a label in two splits.

    Inputs and labels are int64 of shape (batch, block); the labels are the inputs shifted by one token.

    Args:
        root: a text in UTF-8, a directory of .txt files, or a pattern such as books/*.txt; files are joined in the
            order of their paths. A Python module stands for its longest string.
        tokenizer: `characters` that occur in the text, in the order of their code points; `bytes`; or a file of the
            package tokenizers, or a .gguf file.
        block: tokens per example; remaining tokens at the end of a part are not used.
        test_fraction: fraction of the characters or bytes of the text.
        tests: name -> a further text to test on, with the same tokens; a file or a directory, as `root`.
        test_size: number of blocks in each test split, in place of `test_fraction`; None: the fraction, and all of
            further texts.
        content: digests that the files must have; None accepts any.

    Raises:
        DataError: a file is absent, not text, or different from the planned one, or a text is too short, or has
            characters that `root` does not have.
    """
    try:
        found = content_of_text(root, tokenizer, tests)
    except Misplaced as error:
        raise DataError(f"`data` (root={root}, tokenizer={tokenizer}): it {error}") from None
    if content is not None and found != content:
        raise DataError(
            f"`data.root` (={root}) and its tokenizer must be those that the sweep was planned with, but one has "
            "changed, or this node has another; run the same command again."
        )

    def prepare() -> dict[str, Tensor]:
        parts, vocabulary, letters = _tokenised(_read(root), tokenizer, fraction, root)
        codec, further = _codec(tokenizer, letters), {}
        for name, path in (tests or {}).items():
            tokens = _encoded(codec, f"data.tests.{name}", path)
            further[f"test {name}"] = torch.tensor(tokens).to(torch.from_numpy(parts[0]).dtype)
        return {
            "train": torch.from_numpy(parts[0]),
            "test": torch.from_numpy(parts[1]),
            "vocabulary": torch.tensor(vocabulary),
            "letters": torch.from_numpy(letters.astype(np.int32)),
            **further,
        }

    fraction = test_fraction if test_size is None else 0.0
    kind = tokenizer if tokenizer in ("characters", "bytes") else release_of("tokenizers")
    held = node_cache.shared({"text": found, "tokenizer": kind, "test_fraction": fraction}, prepare)
    train, test = held["train"], held["test"]
    if test_size is not None:
        train, test = _cut_blocks(train, test_size, block)
    parts = {"train": train, "test": test}
    splits = {part: _blocks(tokens, block, f"{part} part of the text") for part, tokens in parts.items()}
    most = None if test_size is None else test_size * block + 1
    further = {name: _blocks(held[f"test {name}"][:most], block, f"text `data.tests.{name}`") for name in tests or {}}
    codec = _codec(tokenizer, held["letters"].numpy())
    return {**splits, "tests": further, "classes": int(held["vocabulary"]), "codec": codec}


def _read(root: str) -> bytes:
    return b"".join(map(text_bytes, texts(root)))


def _cut_blocks(tokens: Tensor, count: int, block: int) -> tuple[Tensor, Tensor]:
    """Return the tokens before the last `count` blocks, and those of these blocks with the last label."""
    length = count * block + 1
    if len(tokens) < length + block + 1:
        raise DataError(
            f"`data.test_size` (={count}) blocks of {block} tokens must leave a block for training, but the text has "
            f"{len(tokens)} tokens; pass a smaller number, or use more text."
        )
    return tokens[:-length], tokens[-length:]


def _blocks(tokens: Tensor, block: int, part: str) -> TensorSplit:
    count = (len(tokens) - 1) // block
    if count < 1:
        raise DataError(
            f"`data.block` (={block}) must be less than {len(tokens)}, the tokens of the {part}; pass a smaller "
            "block, or use more text."
        )
    inputs, following = (tokens[start : start + count * block].view(count, block) for start in (0, 1))
    return TensorSplit(inputs, following, Tensor.long, in_order=True)


def _encoded(codec: TextCodec, key: str, path: str) -> list[int]:
    whole = _read(path)
    if isinstance(codec, ByteCodec):
        return [*whole]
    said = _decoded(whole, key, path)
    try:
        return codec.encode(said)
    except DataError as error:
        raise DataError(f"`{key}` (={path}) {error}") from None


def _decoded(whole: bytes, key: str, path: str) -> str:
    try:
        return whole.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"`{key}` (={path}) must be text in UTF-8 (byte {error.start}: {error.reason}); convert it, or pass "
            "data.tokenizer=bytes."
        ) from None


def _codec(tokenizer: str, letters: NDArray[Any]) -> TextCodec:
    """Return the codec of a tokenizer; `letters` are the code points of the tokens if they are characters."""
    if tokenizer == "bytes":
        return ByteCodec()
    return Characters("".join(map(chr, letters))) if tokenizer == "characters" else Tokenizer(_loaded(tokenizer))


def _tokenised(
    whole: bytes, tokenizer: str, test_fraction: float, root: str
) -> tuple[Sequence[NDArray[Any]], int, NDArray[Any]]:
    """Return the tokens of the training and test parts of a text, the size of the vocabulary, and its code points."""
    if tokenizer == "bytes":
        codes = np.frombuffer(whole, np.uint8).copy()
        return np.split(codes, [_cut(len(codes), test_fraction)]), 256, np.array([])
    said = _decoded(whole, "data.root", root)
    cut = _cut(len(said), test_fraction)
    if tokenizer != "characters":
        return *_tokenised_by_file(tokenizer, (said[:cut], said[cut:])), np.array([])
    points = np.frombuffer(said.encode("utf-32-le"), np.uint32)
    occurs = np.zeros(0x110000, bool)
    occurs[points] = True
    vocabulary = int(occurs.sum())
    number = (np.cumsum(occurs) - 1).astype(_token_dtype(vocabulary))
    return np.split(number[points], [cut]), vocabulary, np.flatnonzero(occurs)


def _loaded(path: str) -> Any:
    """Return the tokenizer in a file of the package tokenizers; raise `DataError` if it cannot be read."""
    try:
        import tokenizers

        if path.endswith(GGUF):
            return tokenizers.Tokenizer.from_str(tokenizer_of(path, f"`data.tokenizer` (={path})"))
        return tokenizers.Tokenizer.from_file(path)
    except OrchestratorError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        said = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"`data.tokenizer` (={path}) cannot be read as a file of the package tokenizers: {said}; pass a file "
            "that Tokenizer.save wrote, or characters."
        ) from None


def _tokenised_by_file(path: str, parts: Sequence[str]) -> tuple[Sequence[NDArray[Any]], int]:
    tokenizer = _loaded(path)
    vocabulary = tokenizer.get_vocab_size()
    coded = [tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
    return [np.array(ids).astype(_token_dtype(vocabulary)) for ids in coded], vocabulary


def _cut(length: int, test_fraction: float) -> int:
    return length - round(length * test_fraction)


def _token_dtype(vocabulary: int) -> type[np.uint8] | type[np.uint16] | type[np.int32]:
    """Return the smallest integer type, of those that torch has, too, for this many tokens."""
    return np.uint8 if vocabulary <= 2**8 else np.uint16 if vocabulary <= 2**16 else np.int32
