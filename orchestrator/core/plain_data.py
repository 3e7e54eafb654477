"""Plain data of foreign origin: JSON within bounds, and dataclasses whose annotations hold as they are read."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

MOST_BYTES, MOST_CONTAINERS, DEEPEST, MOST_DIGITS = 2**27, 2**21, 64, 300
"""Of a JSON text: its size, the objects and arrays in it, their nesting, and the digits of an integer."""


@dataclass(frozen=True)
class Within:
    """The bounds of a number."""

    low: float
    high: float

    def check(self, value: Any) -> None:
        """Raise ValueError unless the bounds hold."""
        if not self.low <= value <= self.high:
            raise ValueError(f"must lie between {self.low} and {self.high}, found {quoted(value)}")


@dataclass(frozen=True)
class Matching:
    """The pattern of a text, and what such a text is."""

    pattern: re.Pattern[str]
    what: str

    def check(self, value: Any) -> None:
        """Raise ValueError unless the text matches."""
        if not self.pattern.fullmatch(value):
            raise ValueError(f"must be {self.what}, found {quoted(value)}")


Count = Annotated[int, Within(0, 2**63 - 1)]
Fraction = Annotated[float, Within(0, 1)]
Number = Annotated[float, Within(-1e150, 1e150)]
"""Its square is a number as well."""
Seconds = Annotated[float, Within(0, 1e11)]
"""A duration, or a time since 1970."""
Sha256 = Annotated[str, Matching(re.compile("[0-9a-f]{64}"), "64 hex digits")]


def parse_json(content: bytes) -> Any:
    """Return the value of a JSON text; its size and depth, and what its numbers and strings may be, are bounded.

    Raises:
        ValueError: it is no JSON, or beyond the bounds
    """
    refuse_large(content)
    try:
        value = _DECODER.decode(text := content.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("{") + text.count("[") > DEEPEST:
        _refuse_deep(value)
    if "\\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # no halves of a character: nothing could write them
    return value


def refuse_large(content: bytes) -> None:
    """Raise ValueError for a JSON text of which `parse_json` would make more than memory should hold."""
    if len(content) > MOST_BYTES or content.count(b"{") + content.count(b"[") > MOST_CONTAINERS:
        raise ValueError(f"it is larger than {MOST_BYTES} bytes or {MOST_CONTAINERS} objects and arrays")


def read_as(kind: Any, data: Any) -> Any:
    """Return what plain `data` says as `kind`: a dataclass, whose fields are checked against their annotations.

    Annotations, and `kind`, are made of str, int, float, bool, None, Any, Mapping[str, ...], tuple[..., ...],
    dataclasses, and `Annotated` with a check. Members of `data` that are no field are left out.

    Raises:
        ValueError: a field is missing, of another type or out of its bounds; it is named
    """
    return _reader(kind)(data)


def quoted(value: Any) -> str:
    """Return how a value of any size is quoted in a message."""
    text = repr(value[:200] if isinstance(value, str) else value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def _refuse_deep(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            below
            for each in level
            if isinstance(each, dict | list)
            for below in (each.values() if isinstance(each, dict) else each)
        ]
    if level:
        raise ValueError(f"it is nested more than {DEEPEST} deep")


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"an integer has {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    if abs(value := float(text)) == float("inf"):
        raise ValueError(f"{quoted(text)} is no finite number")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no finite number")


_DECODER = json.JSONDecoder(parse_int=_integer, parse_float=_real, parse_constant=_no_number)
_SCALARS: dict[Any, set[type]] = {str: {str}, int: {int}, float: {int, float}, bool: {bool}}


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """Return what reads a value of the annotation `kind`."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass_reader(kind)
    if origin in (Union, types.UnionType):
        (other,) = (_reader(each) for each in arguments if each is not types.NoneType)
        return lambda value: None if value is None else other(value)
    if origin is tuple:
        each = _reader(arguments[0])
        return lambda value: tuple([each(item) for item in _of(list | tuple, "a list", value)])
    if origin is Mapping:
        return _mapping_reader(arguments[1])
    check, unbounded = _checker(kind), _SCALARS.get(kind, set())
    return lambda value: value if type(value) in unbounded else check(value, (value,))


def _mapping_reader(kind: Any) -> Callable[[Any], Any]:
    """Return what reads an object whose values are of `kind`: scalars are looked at together."""
    if kind in _SCALARS or get_origin(kind) is Annotated:
        check = _checker(kind)
        return lambda value: check(value, _of(dict, "an object", value).values())
    read = _reader(kind)
    return lambda value: {name: read(each) for name, each in _of(dict, "an object", value).items()}


def _checker(kind: Any) -> Callable[[Any, Iterable[Any]], Any]:
    """Return what returns a value, and raises ValueError unless its parts are of the scalar `kind`, by its rule."""
    base, *rules = get_args(kind) or (kind,)
    fits = _SCALARS[base].issuperset

    def check(whole: Any, values: Iterable[Any]) -> Any:
        if not fits(map(type, values)):
            found = ", ".join(sorted({type(each).__name__ for each in values}))
            raise ValueError(f"must be {base.__name__}, found {found}")
        for rule in rules:
            for value in values:
                rule.check(value)
        return whole

    return check


def _of(kind: Any, said: str, value: Any) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"must be {said}, found {type(value).__name__}")
    return value


def _dataclass_reader(kind: Any) -> Callable[[Any], Any]:
    hints = get_type_hints(kind, include_extras=True)
    readers = [(each.name, _reader(hints[each.name])) for each in fields(kind)]
    needed = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}

    def read(data: Any) -> Any:
        if missing := needed.difference(_of(dict, "an object", data)):
            raise ValueError(f"`{min(missing)}` is missing")
        values, name = {}, ""
        try:
            for name, reader in readers:
                if name in data:
                    values[name] = reader(data[name])
        except ValueError as error:
            raise ValueError(f"`{name}` {error}") from None
        return kind(**values)

    return read
