"""docs/reference/configuration.md as text: every key of the schema, and every option of a group. Reads conf/ alone."""

from __future__ import annotations

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from orchestrator.catalogue.formats import FORMATS, Format
from orchestrator.config import config_groups, hydra_options, schema
from orchestrator.config.parts import method_choices
from pruning.catalogue.presets import DYNAMICS, SCOPES, UNITS
from scripts.reference import conf_files

HEAD = """\
# Configuration

<!-- Made by `.venv/bin/python -m scripts.reference` from the catalogues, orchestrator/config and conf/; edit those. -->

Every key that a trial has, with what it is without a word of yours, and every option of a group. A key is set as
`python -m orchestrator train.epochs=20`, an option chosen as `python -m orchestrator model=mlp`;
`python -m orchestrator --cfg job` shows what comes of both. Any key can be an axis of a sweep: add `-m` and commas.

*default* is what the options chosen by default make it; behind it stands which options make it what else.

"""
SHARED: Mapping[str, type] = {
    name: config_groups.dataclass_of(name, of.built_in) for name, of in config_groups.GROUPS.items()
}
"""Group -> the keys that all its built-in options have."""
FURTHER = {
    "optimizer": "Ready nodes for `train.optimizer` and `finetune.optimizer`, as in `optimizer@train.optimizer=adam`.",
    "scheduler": "Ready nodes for `train.scheduler` and `finetune.scheduler`, as in `scheduler@train.scheduler=step`.",
    "control": "What pruned networks are to be compared with, beside the dense one.",
    "sweep": "Presets: axes and settings of a whole sweep, as in `+sweep=random_amounts`.",
}
"""Groups that are no key of a trial -> what they are for."""


def page(conf: Path) -> str:
    """Return the page, of the configuration in the folder `conf`."""
    hydra_options.register()
    with initialize_config_dir(str(conf), version_base="1.3"):
        composed = OmegaConf.to_container(compose("config"), resolve=False)
    assert isinstance(composed, dict)
    defaults = {str(key): value for key, value in composed.items()}
    files = {
        (path.parent.relative_to(conf).as_posix(), path.stem): path
        for path in sorted(conf.rglob("*.yaml"))
        if path.parent != conf and not path.is_relative_to(conf / "hydra")
    }
    options = {choice: _of_file(choice, path) for choice, path in files.items()} | dict(_stored())
    return HEAD + "\n".join(_page(defaults, dict(sorted(options.items()))))


@dataclass(frozen=True)
class _Option:
    """An option of a group: what it is, what it chooses and what it sets."""

    group: str
    name: str
    meaning: str
    chosen: Sequence[str] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)


def _of_file(choice: tuple[str, str], path: Path) -> _Option:
    """Return the option that a file of conf/ is; its first comment says what it is."""
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    everywhere = "# @package _global_" in text
    chosen = list(_choices(content.pop("defaults", []), "" if everywhere else f"{choice[0]}."))
    axes = content.pop("hydra", {}).get("sweeper", {}).get("params") or {}
    sets = dict(_leaves(content, "" if everywhere else choice[0])) if content else {}
    return _Option(*choice, " ".join(_comments(text)), chosen, sets, axes)


def _stored() -> Iterator[tuple[tuple[str, str], _Option]]:
    """Yield the options that no file has, by group and name."""
    meanings = {
        group: {
            name: " ".join(filter(None, (row.meaning, row.paper and f"({row.paper})"))) for name, row in of.rows.items()
        }
        for group, of in config_groups.GROUPS.items()
    }
    presets = {"unit": UNITS, "scope": SCOPES, "dynamics": DYNAMICS}
    meanings |= {group: {name: preset.meaning for name, preset in of.items()} for group, of in presets.items()}
    meanings["deploy"] = {"none": "nothing is deployed"} | {name: _deployed(row) for name, row in FORMATS.items()}
    for group, options in hydra_options.stored_options().items():
        for name, make in options.items():
            own = f"your own: name it by `{group}._target_`, which chooses this option by itself"
            made = make()
            sets = _differences(group, made) if isinstance(made, type) else {} if name == config_groups.OWN else made
            meaning = own if name == config_groups.OWN else meanings[group][name]
            yield (group, name), _Option(group, name, meaning, sets={f"{group}.{k}": v for k, v in sets.items()})


def _deployed(row: Format) -> str:
    return f"{row.meaning}{f'; takes the extra `{row.extra}`' if row.extra else ''}"


def _differences(group: str, kind: type) -> dict[str, Any]:
    """Return the defaults of an option that others of its group have otherwise or not at all."""
    plain = {name: _default(SHARED[group], name) for name in fields_of(SHARED[group])}
    found = {name: _default(kind, name) for name in fields_of(kind)}
    return {name: value for name, value in found.items() if value != plain.get(name, ...)}


def _comments(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if not line.startswith("#"):
            return
        if not line.startswith(("# @package", "# Made from its row")):
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
        kind = (
            hints[name] if is_dataclass(hints[name]) else SHARED.get(name) or getattr(method_choices, name.capitalize())
        )
        yield f"\n## {name}\n\n{said[name]}\n"
        yield from _table(name, options)
        if name == "finetune":
            longer = {key: value for key, value in defaults[name].items() if value != defaults["train"][key]}
            yield f"\nIts keys are those of [train](#train); by default {_settings('finetune', longer)}.\n"
            continue
        yield from _keys(name, kind, defaults[name], options)
        for built_in, row in (config_groups.GROUPS[name].rows if name in config_groups.GROUPS else {}).items():
            own = config_groups.schema_of(name, built_in)
            if further := [key for key in meanings(own) if _differs(key, own, kind)]:
                begin = row.meaning[0].upper() if row.meaning[:2].isalpha() else row.meaning[0]  # else it is a formula
                yield f"\n### {name}={built_in}\n\n{begin}{row.meaning[1:]}\n"
                yield from _keys(name, own, {key: _default(own, key) for key in meanings(own)}, {}, further)
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
        if each.name in SHARED or is_dataclass(get_type_hints(schema.Config)[each.name])
    ]


def _table(group: str, options: Mapping[tuple[str, str], _Option]) -> Iterator[str]:
    """Yield the options of a group: what each is, chooses and sets."""
    inside = [each for each in options.values() if (each.group + "/").startswith(f"{group}/")]
    if not inside:
        return
    yield "| option | what it is | what it chooses and sets |\n|---|---|---|"
    for option in inside:
        name = f"{'+' * (group in ('sweep', 'control'))}{option.group}={option.name}"
        of_row = option.group in conf_files.COMPONENTS  # whose keys have a table of their own
        named = ("name", f"{group}.name", f"{group}.kind")
        sets = {} if of_row else {key: value for key, value in option.sets.items() if key not in named}
        settings = [f"`{each}`" for each in option.chosen if not each.startswith("hydra/schema")]
        settings += [f"`{key}={_value(value)}`" for key, value in [*sets.items(), *option.axes.items()]]
        yield f"| `{name}` | {_cell(option.meaning)} | {_cell(', '.join(settings))} |"
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
    """Return what each key of a dataclass of the schema means.

    A key that an option of a row is says so itself, those of the choices of a method are arguments of the engine's
    classes, all others have docstrings.
    """
    found = {each.name: str(each.metadata.get("meaning", "")) for each in fields(kind)}
    if axis := getattr(kind, "AXIS", None):
        return found | _arguments(axis)
    for each in reversed(kind.__mro__):
        if not is_dataclass(each) or any(found.values()):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for first, second in pairwise(tree.body):
            if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(first.target, ast.Name):
                found[first.target.id] = " ".join(ast.literal_eval(second.value).split())
    return found


def _arguments(kind: type) -> dict[str, str]:
    """Return name -> meaning of the arguments in a class's docstring."""
    said = re.search(r"Args:\n(.*?)\n(?=\n|$)", f"{inspect.getdoc(kind)}\n\n", re.DOTALL)
    assert said is not None
    told = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", said[1], re.DOTALL | re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in told}
    return {name: f"{text[0].upper()}{text[1:]}" for name, text in texts.items()}


def _default(kind: type, name: str) -> Any:
    (each,) = [each for each in fields(kind) if each.name == name]
    return each.default if each.default_factory is MISSING else each.default_factory()


def _values(kind: type, name: str) -> str:
    """Return type and rules of a key."""
    hint = fields_of(kind)[name].type
    said = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    text = re.sub(r"\bNone\b", "null", said.replace("typing.", "")).replace("Any", "any").replace(" | ", "` or `")
    axis = get_type_hints(kind.AXIS).get(name) if hasattr(kind, "AXIS") else None
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


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
