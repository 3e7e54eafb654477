"""Whether a configuration is data that a plan can be made of: whole, and the same after a round trip through JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, get_type_hints

INFINITIES = ("inf", "-inf")
"""How an infinity is written where one makes sense: JSON has none."""


def missing(schema: type, config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each key of the dataclass `schema` that `config` lacks: `~key` takes whole nodes away."""
    for name, nested in keys(schema).items():
        if name not in config:
            yield f"`{prefix}{name}` was taken away, and every trial needs it; leave out `~{prefix}{name}`, or set it."
        elif nested is not None and isinstance(config[name], Mapping):
            yield from missing(nested, config[name], f"{prefix}{name}.")


def unknown(schema: type, config: Mapping[str, Any], groups: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each key of `config` that `schema` lacks: `+` lets any past Hydra.

    `groups` are other words that may have been meant.
    """
    known = keys(schema)
    for key in config:
        if key not in known:
            close = get_close_matches(str(key), [*known, *groups], n=1)
            hint = f"did you mean `{'+' if close[0] in groups else ''}{close[0]}`?" if close else "check the spelling."
            yield f"`{key}` (={config[key]}) is not a key of the configuration and nothing in it refers to it; {hint}"


@cache
def keys(schema: type) -> Mapping[str, type | None]:
    """Field name -> its dataclass, None for a plain value."""
    types = get_type_hints(schema)
    return {name: kind if isinstance(kind, type) and is_dataclass(kind) else None for name, kind in types.items()}


def _is_ordinary(value: Any) -> bool:
    """Whether a value is none of those that must be looked into: most are not, and a plan looks at very many."""
    kind = type(value)
    return value is None or kind is bool or kind is int or (kind is str and value.isascii())


def odd_values(value: Any, path: str = "") -> Iterator[str]:
    """Yield a sentence for each value that JSON, and so the key of a stage, cannot hold: NaN, undecodable text."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"`{path}` has the key {key!r}, and keys must be text; quote it, as in '{key}'."
            elif not _is_ordinary(item):
                yield from odd_values(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from odd_values(item, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"`{path}` (={value}) must be a finite number; pass one, or null where nothing is meant."
    elif isinstance(value, str):
        if not value.isascii() and value != value.encode(errors="ignore").decode():
            yield f"`{path}` (={value!r}) holds bytes that are no text; write it in UTF-8."
    elif not (value is None or isinstance(value, bool | int)):
        yield f"`{path}` (={value!r}) must be text, a number, true, false, null, a list or a mapping."


def with_written_infinities(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return `node` with an infinite `key` written as text, `inf` or `-inf`."""
    value = node.get(key)
    return {**node, key: str(value)} if isinstance(value, float) and math.isinf(value) else node
