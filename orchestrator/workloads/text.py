"""Blocks of tokens from text: inputs, and for each the token that follows it, held once a node in few bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.planning.pinned_content import Misplaced, content_of_text, release_of, texts
from orchestrator.workloads import node_cache
from orchestrator.workloads.splits import TensorSplit


def text(
    root: str,
    tokenizer: str = "characters",
    block: int = 128,
    test_fraction: float = 0.1,
    content: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the blocks of a text: its last part is the test split, and no token is predicted in two splits.

    Inputs and labels are int64 of shape (batch, block), the labels one token further on.

    Args:
        root: a text in UTF-8, or a directory of .txt files, taken one after another in the order of their paths.
        tokenizer: `characters` that occur in the text, in the order of their code points; `bytes`; or a file of the
            package tokenizers.
        block: tokens of an example; those left at the end of a part are not used.
        test_fraction: of the characters, or bytes, of the text.
        content: digests that the files must have; None takes them as they are.

    Raises:
        DataError: a file is absent, no text, or another than planned, or there is too little of it.
    """
    try:
        found = content_of_text(root, tokenizer)
    except Misplaced as error:
        raise DataError(f"`data` (root={root}, tokenizer={tokenizer}): it {error}") from None
    if content is not None and found != content:
        raise DataError(
            f"`data.root` (={root}) or its tokenizer is not what the sweep was planned with: it was changed since, or "
            "this node has another; run the same command again."
        )

    def prepare() -> dict[str, Tensor]:
        whole = b"".join(Path(path).read_bytes() for path in texts(root))
        parts, vocabulary = _tokenised(whole, tokenizer, test_fraction, root)
        return {
            "train": torch.from_numpy(parts[0]),
            "test": torch.from_numpy(parts[1]),
            "vocabulary": torch.tensor(vocabulary),
        }

    kind = tokenizer if tokenizer in ("characters", "bytes") else release_of("tokenizers")
    held = node_cache.shared({"text": found, "tokenizer": kind, "test_fraction": test_fraction}, prepare)
    splits = {part: _blocks(held[part], block, part) for part in ("train", "test")}
    return {**splits, "classes": int(held["vocabulary"])}


def _blocks(tokens: Tensor, block: int, part: str) -> TensorSplit:
    count = (len(tokens) - 1) // block
    if count < 1:
        raise DataError(
            f"`data.block` (={block}) must be less than the {len(tokens)} tokens of the {part} part of the text; pass "
            "a smaller one, or more text."
        )
    inputs, following = (tokens[start : start + count * block].view(count, block) for start in (0, 1))
    return TensorSplit(inputs, following, Tensor.long, in_order=True)


def _tokenised(whole: bytes, tokenizer: str, test_fraction: float, root: str) -> tuple[Sequence[NDArray[Any]], int]:
    """Return the tokens of the training and of the test part of a text, and how many different ones there may be."""
    if tokenizer == "bytes":
        codes = np.frombuffer(whole, np.uint8).copy()
        return np.split(codes, [_cut(len(codes), test_fraction)]), 256
    try:
        said = whole.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"`data.root` (={root}) is no text in UTF-8 (byte {error.start}: {error.reason}); convert it, or pass "
            "data.tokenizer=bytes."
        ) from None
    cut = _cut(len(said), test_fraction)
    if tokenizer != "characters":
        return _by_file(tokenizer, (said[:cut], said[cut:]))
    points = np.frombuffer(said.encode("utf-32-le"), np.uint32)
    occurs = np.zeros(0x110000, bool)
    occurs[points] = True
    vocabulary = int(occurs.sum())
    number = (np.cumsum(occurs) - 1).astype(_dtype(vocabulary))
    return np.split(number[points], [cut]), vocabulary


def _by_file(path: str, parts: Sequence[str]) -> tuple[Sequence[NDArray[Any]], int]:
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(path)
    except Exception as error:  # its errors have no class of their own
        said = " ".join(str(error).split()).rstrip(".")
        raise DataError(
            f"`data.tokenizer` (={path}) cannot be read as a file of the package tokenizers: {said}; pass one that "
            "Tokenizer.save wrote, or characters."
        ) from None
    vocabulary = tokenizer.get_vocab_size()
    coded = [tokenizer.encode(part, add_special_tokens=False).ids for part in parts]
    return [np.array(ids).astype(_dtype(vocabulary)) for ids in coded], vocabulary


def _cut(length: int, test_fraction: float) -> int:
    return length - round(length * test_fraction)


def _dtype(vocabulary: int) -> type[np.uint8] | type[np.uint16] | type[np.int32]:
    """Return the smallest type of which torch, too, can hold so many tokens."""
    return np.uint8 if vocabulary <= 2**8 else np.uint16 if vocabulary <= 2**16 else np.int32
