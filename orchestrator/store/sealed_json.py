"""Sealed JSON files: each holds the digest of its own content, so that truncation and changes are noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from orchestrator.core.plain_data import digest, parse_json, refuse_large

_OPENING = b'{"sha256":"'
_BODY = len(_OPENING) + 64 + len(b'",')


def seal(data: Mapping[str, Any], times: int = 1) -> bytes:
    """Return `data` (plain data, not empty) as a JSON object whose first member `sha256` is the digest of the others.

    sha256 = SHA-256(JSON of data in its order, without spaces)

    Args:
        data: the data
        times: factor on the limits of `parse_json`

    Raises:
        ValueError: `data` holds NaN or an infinity, which JSON cannot represent, or is too large to be read again
    """
    body = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    refuse_large(body, times)
    return _OPENING + digest(body).encode() + b'",' + body[1:]


def unseal(content: bytes, times: int = 1) -> dict[str, Any]:
    """Return the data that `seal` was given; `times` is a factor on the limits of `parse_json`.

    Raises:
        ValueError: the content was changed (the message gives the expected and the found digest), or exceeds the limits
            of `parse_json`
    """
    expected = content[len(_OPENING) : len(_OPENING) + 64].decode(errors="replace")
    if not content.startswith(_OPENING) or len(content) <= _BODY or not expected.isalnum():
        raise ValueError(f"expected a sealed JSON file, found {len(content)} bytes without a seal")
    body = b"{" + content[_BODY:]
    if expected != (found := digest(body)) or content[_BODY - 2 : _BODY] != b'",':
        raise ValueError(f"expected SHA-256 {expected}, found {found}")
    data: dict[str, Any] = parse_json(body, times)
    return data
