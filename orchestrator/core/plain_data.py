"""Plain data: canonical JSON and its digest, a bounded JSON parser, and validation of dataclasses."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

MOST_BYTES, MOST_CONTAINERS, DEEPEST = 2**27, 2**21, 64
"""Limits of a JSON text: its bytes, its number of objects and arrays, and their nesting depth."""
OF_SWEEPS = 8
"""Factor by which a saved sweep may be larger, for its plan of hundreds of thousands of trials."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
LARGEST = 1e150
"""Largest absolute value of a figure: its square is still finite."""
Margin = Annotated[float, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]
"""Duration or Unix time, in seconds."""
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

_T = TypeVar("_T")
_DECODER = msgspec.json.Decoder()


def parse_json(content: bytes, times: int = 1) -> Any:
    """Parse a JSON text of bounded size and depth.

    Args:
        content: the text
        times: factor on the limits of its size

    Raises:
        ValueError: the text is not valid JSON, or exceeds a limit
    """
    refuse_large(content, times)
    try:
        value = _DECODER.decode(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(value, dict | list) and content.count(b"{") + content.count(b"[") > DEEPEST:
        _refuse_deep(value)
    return value


def refuse_large(content: bytes, times: int = 1) -> None:
    """Raise ValueError for a JSON text that would take too much memory to parse; `times` is a factor on the limits."""
    most_bytes, most_containers = times * MOST_BYTES, times * MOST_CONTAINERS
    if len(content) > most_bytes or content.count(b"{") + content.count(b"[") > most_containers:
        raise ValueError(f"it is larger than {most_bytes} bytes or {most_containers} objects and arrays")


def read_as(kind: type[_T], data: Any) -> _T:
    """Convert plain `data` to `kind`, often a dataclass, and check every field against its annotation.

    Keys of `data` without a field are ignored.

    Raises:
        ValueError: a field is missing, has the wrong type or is out of bounds; the text names it
    """
    return msgspec.convert(data, kind)


def quoted(value: Any) -> str:
    """Return the repr of a value for a message, cut to about 200 characters."""
    text = repr(value[:200] if isinstance(value, str) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [
            below
            for each in level
            for below in (each.values() if type(each) is dict else each)
            if type(below) is dict or type(below) is list
        ]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} deep")


def canonical_json(value: Any) -> str:
    """Return the canonical JSON text of `value`: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(text: str | bytes) -> str:
    """Return the SHA-256 of `text` in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
