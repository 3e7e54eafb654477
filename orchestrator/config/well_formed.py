"""Checks that a configuration is complete, has the right types, and survives a round trip through JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

_TYPES: Mapping[Any, tuple[str, str]] = {
    bool: ("true or false", "values true or false"),
    int: ("an integer", "integers, as in [64,32]"),
    float: ("a number", "numbers, as in [0.5]"),
    str: ("text", "text, as in ['conv1.*']"),
    NoneType: ("null", "nulls"),
}
"""Type -> its name in messages, singular and plural."""


def missing(schema: type, config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each key of the dataclass `schema` that `config` lacks: `~key` removes whole nodes."""
    for name, nested in keys(schema).items():
        if name not in config:
            yield f"`{prefix}{name}` was removed, but every trial needs it; leave out `~{prefix}{name}`, or set it."
        elif nested is not None and isinstance(config[name], Mapping):
            yield from missing(nested, config[name], f"{prefix}{name}.")


def unknown(schema: type, config: Mapping[str, Any], groups: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each unknown key of `config`: Hydra accepts every key after a `+`.

    Args:
        schema: the dataclass.
        config: the configuration.
        groups: other names to suggest.
    """
    known = keys(schema)
    for key in config:
        if key not in known:
            close = get_close_matches(str(key), [*known, *groups], n=1)
            hint = f"did you mean `{'+' if close[0] in groups else ''}{close[0]}`?" if close else "check the spelling."
            yield f"`{key}` (={config[key]}) is not a key of the configuration, and no other key refers to it; {hint}"


def mistyped(schema: Any, config: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a sentence for each value of a wrong type: OmegaConf does not check interpolated values."""
    nodes = keys(schema)
    for name, (types, items) in _types_of_fields(schema).items():
        if name not in config:
            continue
        value = config[name]
        inside = (value.values() if type(value) is dict else value) if items and type(value) in (dict, list) else ()
        if type(value) not in types or not items.issuperset(map(type, inside)):
            yield f"`{prefix}{name}` (={value}) must be {described(hints(schema)[name])}."
        elif (nested := nodes[name]) is not None:
            yield from mistyped(nested, value, f"{prefix}{name}.")


@cache
def _types_of_fields(schema: Any) -> Mapping[str, tuple[frozenset[type], frozenset[type]]]:
    """Field name -> allowed types of its value, and of the items of a list or mapping; an empty set allows any."""
    found = {}
    for name, kind in hints(schema).items():
        kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
        items = [get_args(each)[-1] for each in kinds if get_origin(each) in (list, dict)]
        if kind is not Any:
            found[name] = _types(kinds), _types([each for each in items if each is not Any])
    return found


def _types(kinds: Sequence[Any]) -> frozenset[type]:
    plain = [dict if is_dataclass(kind) else get_origin(kind) or kind for kind in kinds]
    return frozenset(plain) | ({int} if float in plain else set())


def described(kind: Any) -> str:
    """Return the name of a type in messages, as in "a number, or null"."""
    inner = get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return ", or ".join(map(described, inner))
    if get_origin(kind) is list:
        return f"a list of {_TYPES[inner[0]][1]}"
    if kind not in _TYPES and not inner:
        return f"a mapping of the keys {', '.join(hints(kind))}"
    return "a mapping, as in {key: value}" if get_origin(kind) is dict else _TYPES[kind][0]


@cache
def hints(schema: Any) -> Mapping[str, Any]:
    """Field name -> its type."""
    return get_type_hints(schema)


@cache
def keys(schema: Any) -> Mapping[str, Any]:
    """Field name -> its dataclass, None for a plain value."""
    return {name: kind if is_dataclass(kind) else None for name, kind in hints(schema).items()}


def _is_ordinary(value: Any) -> bool:
    """Whether a value needs no further check; a shortcut, as plans check very many values."""
    kind = type(value)
    if kind is str:
        return bool(value.isascii())
    return value is None or kind is bool or kind is int or (kind is float and math.isfinite(value))


def values_unfit_for_json(value: Any, path: str = "") -> Iterator[str]:
    """Yield a sentence for each value that JSON, and so a stage's key, cannot hold: NaN, undecodable text."""
    if type(value) is dict or isinstance(value, Mapping):  # dict first: called often, and slow for an abstract class
        for key, item in value.items():
            if not isinstance(key, str):
                yield f"`{path}` has the key {key!r}; keys must be text: quote the key, as in '{key}'."
            elif not _is_ordinary(item):
                yield from values_unfit_for_json(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list | tuple):
        for item in value:
            if not _is_ordinary(item):
                yield from values_unfit_for_json(item, path)
    elif isinstance(value, float):
        if not math.isfinite(value):
            yield f"`{path}` (={value}) must be a finite number; pass a finite number, or null for none."
    elif isinstance(value, str):
        if not value.isascii() and value != value.encode(errors="ignore").decode():
            yield f"`{path}` (={value!r}) must be valid text; write it in UTF-8."
    elif not (value is None or isinstance(value, bool | int)):
        yield f"`{path}` (={value!r}) must be text, a number, true, false, null, a list or a mapping."


def with_written_infinities(node: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return `node` with an infinite value of `key` as text, `inf` or `-inf`."""
    value = node.get(key)
    return {**node, key: str(value)} if isinstance(value, float) and math.isinf(value) else node
