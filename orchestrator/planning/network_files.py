"""Shapes of weights, read from the headers of weight files without torch.

A damaged file tells nothing here, and a worker refuses it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, BinaryIO

from orchestrator.planning.file_places import GGUF, Misplaced, checkpoint, is_uri, parts_of_weights

SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Type of a number in a .gguf file -> its bytes."""
TEXT, ARRAY = 8, 9
"""Types of other values in a .gguf file."""
LARGEST_HEADER = 2**28
"""Maximum number of bytes of the header of a .safetensors file."""


def weight_shapes(model: Mapping[str, Any]) -> Mapping[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a network's weight file, (outputs, inputs) for linear layers.

    Args:
        model: `model` of a configuration without violations.
    """
    try:
        place = checkpoint(model["weights"], model.get("revision")) if model.get("weights") else ""
        parts = [] if not place or is_uri(place) else parts_of_weights(place)
    except Misplaced:
        return {}
    found: dict[str, tuple[int, ...]] = {}
    for part in parts:
        found |= _shapes(part, os.stat(part).st_mtime_ns)
    return found


@cache
def _shapes(place: str, _changed: int) -> Mapping[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a file; `_changed` is the time of its last change."""
    try:
        with open(place, "rb") as file:
            if place.endswith(GGUF):
                return dict(_in_gguf(file))
            return dict(_in_safetensors(file)) if place.endswith(".safetensors") else {}
    except (ValueError, KeyError, TypeError, AttributeError, struct.error):
        return {}


def _in_safetensors(file: BinaryIO) -> Iterator[tuple[str, tuple[int, ...]]]:
    length = _number(file, "Q")
    header = json.loads(file.read(min(length, LARGEST_HEADER)))
    yield from ((name, tuple(each["shape"])) for name, each in header.items() if name != "__metadata__")


def _in_gguf(file: BinaryIO) -> Iterator[tuple[str, tuple[int, ...]]]:
    if file.read(4) != b"GGUF" or _number(file, "I") < 2:
        raise ValueError("no .gguf file of version 2 or later")
    tensors, values = _number(file, "Q"), _number(file, "Q")
    for _ in range(values):
        _text(file)
        _skip(file, _number(file, "I"))
    for _ in range(tensors):
        name = _text(file).decode()
        sizes = [_number(file, "Q") for _ in range(_number(file, "I"))]
        _number(file, "I"), _number(file, "Q")  # type and offset
        yield name, tuple(reversed(sizes))


def _skip(file: BinaryIO, kind: int) -> None:
    """Skip a value of a .gguf file."""
    if kind == TEXT:
        _text(file)
    elif kind == ARRAY:
        inner, count = _number(file, "I"), _number(file, "Q")
        if inner in SIZES:
            file.seek(SIZES[inner] * count, os.SEEK_CUR)
            return
        for _ in range(count):
            _skip(file, inner)
    else:
        file.seek(SIZES[kind], os.SEEK_CUR)


def _text(file: BinaryIO) -> bytes:
    return file.read(_number(file, "Q"))


def _number(file: BinaryIO, form: str) -> int:
    """Read an unsigned little-endian number: `I` of 4 bytes, `Q` of 8."""
    (found,) = struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))
    return int(found)
