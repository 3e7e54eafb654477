"""Plain data: canonical JSON and its digest, JSON within bounds, and dataclasses whose annotations are held."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

MOST_BYTES, MOST_CONTAINERS, DEEPEST = 2**27, 2**21, 64
"""Of a JSON text: its size, the objects and arrays in it, and their nesting."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
LARGEST = 1e150
"""Of a figure: its square is a number as well."""
Margin = Annotated[float, Meta(ge=0, le=LARGEST)]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=1e11)]
"""A duration, or a time since 1970."""
Sha256 = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]

_T = TypeVar("_T")
_DECODER = msgspec.json.Decoder()


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text; its size and depth, and what its numbers and strings may be, are bounded.

    Raises:
        ValueError: it is no JSON, or beyond the bounds
    """
    refuse_large(content)
    try:
        value = _DECODER.decode(content)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if isinstance(value, dict | list) and content.count(b"{") + content.count(b"[") > DEEPEST:
        _refuse_deep(value)
    return value


def refuse_large(content: bytes) -> None:
    """Raise ValueError for a JSON text of which `parse_json` would make more than memory should hold."""
    if len(content) > MOST_BYTES or content.count(b"{") + content.count(b"[") > MOST_CONTAINERS:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes or {MOST_CONTAINERS} objects and arrays")


def read_as(kind: type[_T], data: Any) -> _T:
    """Return what plain `data` says as `kind`: a dataclass, whose fields are checked against their annotations.

    Members of `data` that are no field are left out.

    Raises:
        ValueError: a field is missing, of another type or out of its bounds; it is named
    """
    return msgspec.convert(data, kind)


def quoted(value: Any) -> str:
    """Return how a value of any size is quoted in a message."""
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
    """Return the one JSON text of `value`: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def digest(text: str | bytes) -> str:
    """Return the SHA-256 of `text` in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()
