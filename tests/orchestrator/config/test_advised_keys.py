"""Tests that every key in a message can be typed: a key of the configuration, or an option of a group."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import torch
import yaml

from orchestrator.__main__ import CONF
from orchestrator.config.config_groups import GROUPS, schema_of
from orchestrator.config.deploy import Deploy
from orchestrator.config.hydra_options import stored_options
from orchestrator.config.schema import Config
from orchestrator.results.sweep_results import SweepResults
from orchestrator.training.loop.own_loop import Context
from orchestrator.workloads.data_loading import OURS
from pruning import PruningPlan
from pruning.choices.combining import Choices
from pruning.refused import RefusedType, RefusedValue

ROOT = Path(__file__).parents[3]
HOLE = "\0"
"""Replacement for a placeholder of an f-string."""
WORD = rf"[a-z_{HOLE}][\w{HOLE}]*"
KEY = rf"{WORD}(?:[.@]{WORD})*"
QUOTED = re.compile(rf"`[+~]*({KEY})(?:=([^`]*))?`")
"""Key in backquotes, with or without a value."""
TYPED = re.compile(rf"(?:^|(?<=[\s(\"']))\+?({KEY})=([\w{HOLE}]+\b(?!\()|\[|range)")
"""Key as it is typed: key=value; a list or a range is only recognized by its start."""
ARGUMENTS = re.compile(r"`(\w+)` \(((?!=)[^`]*)\)")
"""Node with its keys in brackets: key=value."""
NO_MESSAGES = ("orchestrator/views/report/", "orchestrator/views/tracking/", "orchestrator/deploy/formats/")
"""Rooms that write HTML, SVG, SQL and source text: only strings in backquotes are keys."""
NOT_CONFIGURED = {
    "key": "stands for any key",
    "run_own_code": "an argument in Python",
    "keep": "an argument in Python",
    "endpoint_url": "an argument of a file system, by --option",
    f"{HOLE}.scope": "a key of before, which is refused",
    f"{HOLE}._partial_": "a key of Hydra beside a `_target_`",
    "mlflow.parentRunId": "a tag",
    "control.kind": "a choice of the engine, which is typed as `restart.control`",
    "pruning.scores": "a module",
}
OTHERS: Mapping[str, Container[str]] = {
    "context": {*dir(Context), "steps"},
    "plan": {each.name for each in fields(PruningPlan)},
    "sweep": dir(SweepResults),
    "measure": {each.name for each in fields(Deploy)},
    "torch": dir(torch),
}
"""Prefix that is not a node of a configuration -> its names."""


REFUSALS = {each.__name__ for each in (RefusedValue, RefusedType)}
"""Errors whose first argument is a key."""


@cache
def strings(package: str) -> tuple[tuple[str, str], ...]:
    """Return (place, text) of all strings in a package except docstrings."""
    return tuple(
        (f"{path.relative_to(ROOT)}:{line}", text)
        for path in sorted((ROOT / package).rglob("*.py"))
        for line, text in _strings(ast.parse(path.read_text()))
    )


def _strings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    yield from _parts(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS:
            yield from ((line, f"`{key}`") for line, key in _parts(node.args[0]))


def _parts(tree: ast.AST) -> Iterator[tuple[int, str]]:
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(v.value if isinstance(v, ast.Constant) else HOLE for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
            yield node.lineno, node.value


def advised(place: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield the (key, value) pairs in a text; the value is empty if the text names only the key."""
    for key, value in QUOTED.findall(text):
        if "." in key or "@" in key or value:
            yield key, value
    if " " in text and not place.startswith(NO_MESSAGES):
        for node in ARGUMENTS.finditer(text):
            yield from ((f"{node[1]}.{key}", value) for key, value in TYPED.findall(node[2]))
        yield from TYPED.findall(QUOTED.sub("", ARGUMENTS.sub("", text)))


def is_known(key: str, value: str = "") -> bool:
    """Whether `key=value` can be typed; a placeholder stands for any valid text."""
    group, _, node = key.partition("@")
    if not key.strip(f"{HOLE}.@") or key in NOT_CONFIGURED or key.startswith("hydra."):
        return True
    if node:
        return _is_option(group, value) and is_known(node)
    first, *rest = key.split(".")
    if first in OTHERS and rest:
        return rest[0] in OTHERS[first]
    return _is_option(key, value) or _is_field([Config], [first, *rest], value)


def _is_option(group: str, value: str) -> bool:
    options = {path.stem for path in (CONF / group).glob("*.yaml")} | {*stored_options().get(group, ())}
    return value in options or (bool(options) and HOLE in value)


def _is_field(schemas: Iterable[type], names: list[str], value: str) -> bool:
    """Whether dotted names lead through these dataclasses to a field that accepts the value."""
    pattern = re.compile(names[0].replace(HOLE, r"\w*"))
    for schema in schemas:
        for each in fields(schema):
            if pattern.fullmatch(each.name) is None:
                continue
            if len(names) == 1 and _takes(each, value):
                return True
            if len(names) > 1 and _is_inside(schema, each, names[1:], value):
                return True
    return False


def _takes(field: Field[Any], value: str) -> bool:
    if not value or HOLE in value:
        return True
    if field.name in GROUPS or value in ("[", "range"):
        return field.name not in GROUPS  # a group's value must be an option
    parsed = yaml.safe_load(value)
    return all(rule.holds(parsed) for rule in field.metadata.get("rules", ()))


def _is_inside(schema: type, field: Field[Any], names: list[str], value: str) -> bool:
    """Whether the remaining names exist inside a field: a dataclass, a group's node, or a mapping."""
    if schema is Config and field.name in GROUPS:
        kinds = (None, *GROUPS[field.name].rows)
        open_too = {"data": OURS}.get(field.name, ())
        return names[0] in open_too or _is_field([schema_of(field.name, kind) for kind in kinds], names, value)
    if field.name in ("optimizer", "scheduler"):
        return names[0] in {
            name for path in (CONF / field.name).glob("*.yaml") for name in yaml.safe_load(path.read_text())
        }
    hint = get_type_hints(schema)[field.name]
    nested = [kind for kind in (hint, *get_args(hint)) if is_dataclass(kind)]
    return _is_field(nested, names, value) if nested else "dict" in str(hint) or names == ["_target_"]


@pytest.mark.slow
def test_every_key_that_a_message_advises_can_be_typed() -> None:
    found = ((place, *each) for place, text in strings("orchestrator") for each in advised(place, text))

    assert [each for each in found if not is_known(*each[1:])] == []


@pytest.mark.slow
def test_every_choice_that_the_engine_names_is_one_of_its_own_or_a_key() -> None:
    named = ((place, key) for place, text in strings("pruning") for key, _ in advised(place, text) if "." in key)

    assert [each for each in named if not is_known(each[1]) and not _is_field([Choices], each[1].split("."), "")] == []


def test_the_collector_sees_what_cannot_be_typed() -> None:
    seen = list(
        advised("orchestrator/x.py", "lower `optimizer.lr`, clip by `clip_norm=1.0`, or pass train.epoch=3 task=no")
    )

    assert seen == [("optimizer.lr", ""), ("clip_norm", "1.0"), ("train.epoch", "3"), ("task", "no")]
    assert not any(is_known(*each) for each in seen)
    known = [
        ("train.optimizer.lr", "0.1"),
        ("finetune.clip_norm", "1.0"),
        ("task", "regression"),
        ("control", "longer"),
    ]
    assert all(is_known(*each) for each in known)
    assert is_known("optimizer@train.optimizer", "adam")
    assert not is_known("train.precision", "fp8")
    assert not is_known("train.optimizer.rate")
    assert len({key for place, text in strings("orchestrator") for key, _ in advised(place, text)}) > 100
