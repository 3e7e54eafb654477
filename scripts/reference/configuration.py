"""docs/reference/configuration.md as text: every key of the schema, and every option of a group. Reads conf/ alone."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from orchestrator.config import components, schema
from orchestrator.config.parts import model_and_data
from pruning.choices import axes

HEAD = """\
# Configuration

<!-- Made by `.venv/bin/python -m scripts.reference` of the schema in orchestrator/config and of conf/; edit those. -->

Every key that a trial has, with what it is without a word of yours, and every option of a group. A key is set as
`python -m orchestrator train.epochs=20`, an option chosen as `python -m orchestrator model=mlp`;
`python -m orchestrator --cfg job` shows what comes of both. Any key can be an axis of a sweep: add `-m` and commas.

*default* is what the options chosen by default make it; behind it stands which options make it what else.

"""
OWN: Mapping[str, type] = {
    "model": model_and_data.Model,
    "data": model_and_data.DataSet,
    "task": model_and_data.Component,
    "score": schema.NODES["score"]["base"],
    "method": components.Method,
}
"""Group -> the keys that one of the user's own has, too."""
FURTHER = {
    "optimizer": "Ready nodes for `train.optimizer` and `finetune.optimizer`, as in `optimizer@train.optimizer=adam`.",
    "scheduler": "Ready nodes for `train.scheduler` and `finetune.scheduler`, as in `scheduler@train.scheduler=step`.",
    "control": "What pruned networks are to be compared with, beside the dense one.",
    "sweep": "Presets: axes and settings of a whole sweep, as in `+sweep=random_amounts`.",
}
"""Groups that are no key of a trial -> what they are for."""


def page(conf: Path) -> str:
    """Return the page, of the configuration in the folder `conf`."""
    schema.register()
    with initialize_config_dir(str(conf), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config"), resolve=False)
    assert isinstance(composed, dict)
    defaults = {str(key): value for key, value in composed.items()}
    files = {
        (path.parent.relative_to(conf).as_posix(), path.stem): path
        for path in sorted(conf.rglob("*.yaml"))
        if path.parent != conf and not path.is_relative_to(conf / "hydra")
    }
    options = {choice: _Option(choice, path) for choice, path in files.items()}
    return HEAD + "\n".join(_page(defaults, options))


class _Option:
    """A file of a group: its name, its first comment, what it chooses and what it sets."""

    def __init__(self, choice: tuple[str, str], path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.group, self.name = choice
        self.meaning = " ".join(_comments(text))
        content = yaml.safe_load(text) or {}
        everywhere = "# @package _global_" in text
        self.chosen = list(_choices(content.pop("defaults", []), "" if everywhere else f"{self.group}."))
        hydra = content.pop("hydra", {})
        self.axes: Mapping[str, Any] = hydra.get("sweeper", {}).get("params") or {}
        self.sets = dict(_leaves(content, "" if everywhere else self.group)) if content else {}


def _comments(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith("# @package"):
            yield line.removeprefix("# ")


def _choices(defaults: list[Any], where: str) -> Iterator[str]:
    for each in defaults:
        for place, choice in each.items() if isinstance(each, dict) else ():
            group, _, key = place.removeprefix("override ").removeprefix("/").partition("@")
            yield f"{group}{f'@{where}{key}' if key not in ('', '_here_') else ''}={choice}"


def _leaves(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node and not (path and "_target_" in node and path.count(".")):
        for name, value in node.items():
            yield from _leaves(value, f"{path}.{name}" if path else str(name))
    else:
        yield path, node


def _page(defaults: Mapping[str, Any], options: Mapping[tuple[str, str], _Option]) -> Iterator[str]:
    said = meanings(schema.Config)
    hints = get_type_hints(schema.Config)
    yield "## A trial\n"
    yield from _keys("", schema.Config, defaults, options, [name for name in hints if name not in _groups()])
    for name in _groups():
        kind = hints[name] if is_dataclass(hints[name]) else OWN[name]
        yield f"\n## {name}\n\n{said[name]}\n"
        yield from _table(name, options)
        if name == "finetune":
            longer = {key: value for key, value in defaults[name].items() if value != defaults["train"][key]}
            yield f"\nIts keys are those of [train](#train); by default {_settings('finetune', longer)}.\n"
            continue
        yield from _keys(name, kind, defaults[name], options)
        for built_in, own in components.BUILT_IN.get(name, {}).items():
            if further := [key for key in meanings(own) if _differs(key, own, kind)]:
                first = {key: _default(own, key) for key in meanings(own)}
                set_there = options[name, built_in].sets if (name, built_in) in options else {}
                first |= {key.partition(".")[2]: value for key, value in set_there.items()}
                yield f"\n### {name}={built_in}\n\n{_first_line(own)}\n"
                yield from _keys(name, own, first, {}, further)
    for group, meaning in FURTHER.items():
        yield f"\n## {group}\n\n{meaning}\n"
        yield from _table(group, options)


def _differs(key: str, own: type, kind: type) -> bool:
    """Whether a built-in has a key that others have not, or another default of it."""
    if key in ("kind", "name"):
        return False
    return key not in fields_of(kind) or _default(own, key) != _default(kind, key)


def _groups() -> list[str]:
    return [
        each.name
        for each in fields(schema.Config)
        if each.name in OWN or is_dataclass(get_type_hints(schema.Config)[each.name])
    ]


def _table(group: str, options: Mapping[tuple[str, str], _Option]) -> Iterator[str]:
    """Yield the options of a group: what each is, chooses and sets."""
    inside = [each for each in options.values() if (each.group + "/").startswith(f"{group}/")]
    if not inside:
        return
    yield "| option | what it is | what it chooses and sets |\n|---|---|---|"
    for option in inside:
        name = f"{'+' * (group in ('sweep', 'control'))}{option.group}={option.name}"
        sets = {
            key: value for key, value in option.sets.items() if key not in ("name", f"{group}.name", f"{group}.kind")
        }
        settings = [f"`{each}`" for each in option.chosen if not each.startswith("hydra/schema")]
        settings += [f"`{key}={_value(value)}`" for key, value in [*sets.items(), *option.axes.items()]]
        meaning = option.meaning or _first_line(components.BUILT_IN.get(group, {}).get(option.name))
        yield f"| `{name}` | {_cell(meaning)} | {_cell(', '.join(settings))} |"
    yield ""


def _keys(
    where: str,
    kind: type,
    values: Mapping[str, Any],
    options: Mapping[tuple[str, str], _Option],
    names: list[str] | None = None,
) -> Iterator[str]:
    """Yield the table of the keys `names` of a dataclass, or of all."""
    said = meanings(kind)
    yield "| key | default | values | meaning |\n|---|---|---|---|"
    for name in names or said:
        key = f"{where}.{name}" if where else name
        default = f"`{_value(values.get(name, _default(kind, name)))}`"
        others: dict[str, list[str]] = {}
        for option in options.values():
            if key in option.sets and option.group.split("/")[0] != "sweep" and name not in ("kind", "name"):
                others.setdefault(f"`{_value(option.sets[key])}`", []).append(f"{option.group}={option.name}")
        others.pop(default, None)
        default += "".join(f"; {value}: {', '.join(choices)}" for value, choices in others.items())
        yield f"| `{key}` | {_cell(default)} | {_cell(_values(kind, name))} | {_cell(said[name])} |"


def meanings(kind: type) -> dict[str, str]:
    """Return what each key of a dataclass of the schema means, by the docstrings of its attributes.

    Those of the choices of a pruning method are arguments of the class in `pruning.choices.axes` that theirs names.
    """
    found = dict.fromkeys((each.name for each in fields(kind)), "")
    for each in reversed(kind.__mro__):
        if not is_dataclass(each):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for first, second in pairwise(tree.body):
            if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(first.target, ast.Name):
                found[first.target.id] = " ".join(ast.literal_eval(second.value).split())
        if arguments := re.search(r"Args:\n(.*?)\n(?=\n|$)", f"{inspect.getdoc(_axis(each))}\n\n", re.DOTALL):
            for name, text in re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", arguments[1], re.DOTALL | re.MULTILINE):
                text = " ".join(text.split())
                found[name] = found.get(name) or f"{text[0].upper()}{text[1:]}"
    return found


def _axis(kind: type) -> type | None:
    named = re.search(r"see `pruning\.choices\.axes\.(\w+)`", kind.__doc__ or "")
    return getattr(axes, named[1]) if named else None


def _default(kind: type, name: str) -> Any:
    (each,) = [each for each in fields(kind) if each.name == name]
    return each.default if each.default_factory is MISSING else each.default_factory()


def _values(kind: type, name: str) -> str:
    """Return type and rules of a key."""
    text = re.sub(r"\bNone\b", "null", str(fields_of(kind)[name].type)).replace("Any", "any").replace(" | ", "` or `")
    axis = get_type_hints(_axis(kind)).get(name) if _axis(kind) else None
    literal = next((each for each in (axis, *get_args(axis)) if get_origin(each) is Literal), None)
    rules = [f"one of {', '.join(get_args(literal))}"] if literal else []
    for rule in fields_of(kind)[name].metadata.get("rules", ()):
        # a remedy or an aside goes, an interval such as (0, 1) stays
        told = f"must {re.split(r'; |: | [(](?![0-9])', rule.text)[0].removesuffix(', or null')}"
        rules.append(told.removeprefix("must be "))
    return "; ".join([f"`{text}`", *(rule for rule in rules if rule != "true or false")])


def fields_of(kind: type) -> Mapping[str, Any]:
    """Return the fields of a dataclass by name."""
    return {each.name: each for each in fields(kind)}


def _settings(where: str, values: Mapping[str, Any]) -> str:
    return ", ".join(f"`{where}.{key}={_value(value)}`" for key, value in values.items())


def _value(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _first_line(kind: Any) -> str:
    return "" if kind is None or kind in OWN.values() else str(inspect.getdoc(kind)).partition("\n")[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
