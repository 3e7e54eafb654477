"""Text of docs/reference/configuration.md: every key of the schema and every option of a group. Reads only conf/."""

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

from orchestrator.catalogue.formats import FORMATS, FormatRow
from orchestrator.config import config_groups, hydra_options, round_schema, schema
from orchestrator.config.deploy import SETS
from pruning.catalogue.presets import SCOPES, UNITS
from scripts.reference import conf_files

HEAD = """\
# Configuration

<!-- Made by `.venv/bin/python -m scripts.reference` from the catalogues, orchestrator/config and conf/; edit those. -->

After this page you can find every key of a trial, with its default, and every option of a group. Set a key with
`python -m orchestrator train.epochs=20`, and choose an option with `python -m orchestrator model=mlp`.
`python -m orchestrator --cfg job` prints the resulting configuration. Every key can be an axis of a sweep: add `-m` and
separate the values by commas, as in `python -m orchestrator -m train.epochs=10,20`.

In the tables, *default* is the value with the default options, followed by the options that set another value.
[`kind` and `_target_`](networks-and-data.md#kind-and-_target_) explains the two keys that choose a component.
"""
CONTENTS = {
    "What is trained": ("model", "data", "task", "train"),
    "How it is pruned": ("method", "score", "unit", "scope", "dynamics", "repair", "schedule", "prune"),
    "What happens after pruning": ("finetune", "restart", "deploy", "harness", "compare"),
    "Which trials run": ("search",),
    "Where it runs, and where results go": ("cluster", "parallel", "store", "tracking"),
    "Ready-made parts and whole sweeps": ("optimizer", "scheduler", "control", "sweep"),
}
"""Topic -> groups, in the order of the table of contents."""
FIRST = {
    "model": ("model=resnet20", "Choose the network; `model._target_=mine.net` uses your own."),
    "data": ("data=mnist", "Choose the data set; `data._target_=mine.data` uses your own."),
    "task": ("task=regression", "Choose the loss and the metrics."),
    "method": ("method=l1_unstructured", "Choose a pruning method by its name."),
    "schedule.sparsity": ("schedule.sparsity=0.9", "Fraction of the prunable weights that is zero in the end."),
    "schedule.rounds": ("schedule.rounds=5", "Number of rounds of pruning and fine-tuning."),
    "unit": ("unit=group", "Prune single weights, blocks, or whole channels; `group` lets `deploy` remove them."),
    "seed": ("-m 'seed=range(5)'", "Seed of the initialisation, the order of the data and random masks; use several."),
    "train.epochs": ("train.epochs=30", "Length of the dense training."),
    "train.optimizer.lr": ("train.optimizer.lr=0.01", "Learning rate of the dense training."),
    "finetune.epochs": ("finetune.epochs=10", "Length of the fine-tuning after each round."),
    "model.weights": ("model.weights=base.pt train=none", "Start from a checkpoint, here without training it first."),
    "data.root": ("data=mnist data.root=/data", "Folder of the data sets that are files."),
    "compare.margin": (
        "compare.margin=0.005",
        "Largest loss against dense that counts as a match, in the metric's scale.",
    ),
    "deploy": ("deploy=shrink", "Remove empty channels at the end, and measure time and bytes."),
    "cluster": ("cluster=inline", "Run in this process, on a Ray of its own (`local`), or on a cluster (`auto`)."),
    "cluster.gpus_per_trial": ("cluster.gpus_per_trial=0.25", "GPUs of a trial; here four trials share one."),
    "store.uri": ("store.uri=s3://bucket/prefix", "Directory or bucket that keeps finished stages."),
    "tracking": ("tracking=none", "Write to MLflow, or not."),
    "dry_run": ("dry_run=true", "Print the plan, and run nothing."),
}
"""Key or group -> an example and a sentence: the twenty that people use first."""
SHARED: Mapping[str, type] = {
    name: config_groups.dataclass_of(name, of.built_in) for name, of in config_groups.GROUPS.items()
}
"""Group -> the keys that all its built-in options share."""
FURTHER = {
    "optimizer": "Ready-made `train.optimizer` and `finetune.optimizer`, as in `optimizer@train.optimizer=adam`.",
    "scheduler": "Ready-made `train.scheduler` and `finetune.scheduler`, as in `scheduler@train.scheduler=step`.",
    "control": "Controls: networks to compare pruned networks with, in addition to the dense one.",
    "sweep": "Presets: axes and settings of a whole sweep, as in `+sweep=random_amounts`.",
}
"""Groups without a key in a trial -> their purpose."""


def page(conf: Path) -> str:
    """Return the page for the configuration in the folder `conf`."""
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
    return "\n".join([HEAD, *_contents(), *_page(defaults, dict(sorted(options.items())))])


def _contents() -> Iterator[str]:
    """Yield the table of contents, and the keys that people use first."""
    said = meanings(schema.Config) | FURTHER
    assert {group for groups in CONTENTS.values() for group in groups} == {*_groups(), *FURTHER}
    yield "## Contents\n"
    for topic, groups in CONTENTS.items():
        yield f"**{topic}**\n"
        yield from (f"- [{group}](#{group}): {said[group]}" for group in groups)
        yield ""
    yield "The keys of no group are in [A trial](#a-trial).\n"
    yield f"## The {len(FIRST)} keys to know first\n"
    yield "| key or group | example | meaning |\n|---|---|---|"
    for key, (example, meaning) in FIRST.items():
        group = key.partition(".")[0]
        yield f"| [{key}](#{group if group in _groups() else 'a-trial'}) | `{example}` | {meaning} |"
    yield ""


@dataclass(frozen=True)
class _Option:
    """An option of a group: its meaning, the options that it chooses and the keys that it sets."""

    group: str
    name: str
    meaning: str
    chosen: Sequence[str] = ()
    sets: Mapping[str, Any] = field(default_factory=dict)
    axes: Mapping[str, Any] = field(default_factory=dict)


def _of_file(choice: tuple[str, str], path: Path) -> _Option:
    """Return the option in a file of conf/; the first comment is its meaning."""
    text = path.read_text(encoding="utf-8")
    content = yaml.safe_load(text) or {}
    everywhere = "# @package _global_" in text
    chosen = list(_choices(content.pop("defaults", []), "" if everywhere else f"{choice[0]}."))
    axes = content.pop("hydra", {}).get("sweeper", {}).get("params") or {}
    sets = dict(_leaves(content, "" if everywhere else choice[0])) if content else {}
    return _Option(*choice, " ".join(_comments(text)), chosen, sets, axes)


def _stored() -> Iterator[tuple[tuple[str, str], _Option]]:
    """Yield the options without a file, by group and name."""
    meanings = {
        group: {
            name: " ".join(filter(None, (row.meaning, row.paper and f"({row.paper})"))) for name, row in of.rows.items()
        }
        for group, of in config_groups.GROUPS.items()
    }
    presets = {"unit": UNITS, "scope": SCOPES}
    meanings |= {group: {name: preset.meaning for name, preset in of.items()} for group, of in presets.items()}
    meanings["deploy"] = {name: meaning for name, (_, meaning) in SETS.items()}
    meanings["deploy"] |= {name: _deployed(row) for name, row in FORMATS.items()}
    for group, options in hydra_options.stored_options().items():
        for name, make in options.items():
            own = f"your own code: set `{group}._target_`, which chooses this option"
            made = make()
            sets = _differences(group, made) if isinstance(made, type) else {} if name == config_groups.OWN else made
            meaning = own if name == config_groups.OWN else meanings[group][name]
            yield (group, name), _Option(group, name, meaning, sets={f"{group}.{k}": v for k, v in sets.items()})


def _deployed(row: FormatRow) -> str:
    return f"{row.meaning}{f'; needs the extra `{row.extra}`' if row.extra else ''}"


def _differences(group: str, kind: type) -> dict[str, Any]:
    """Return the defaults of an option that its group lacks or defines differently."""
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
            hints[name] if is_dataclass(hints[name]) else SHARED.get(name) or getattr(round_schema, name.capitalize())
        )
        yield f"\n## {name}\n\n{said[name]}\n"
        yield from _table(name, options)
        if name == "finetune":
            longer = {key: value for key, value in defaults[name].items() if value != defaults["train"][key]}
            yield f"\nThe keys are those of [train](#train). Defaults that differ: {_settings('finetune', longer)}.\n"
            continue
        yield from _keys(name, kind, defaults[name], options)
        for built_in, row in (config_groups.GROUPS[name].rows if name in config_groups.GROUPS else {}).items():
            own = config_groups.schema_of(name, built_in)
            if further := [key for key in meanings(own) if _differs(key, own, kind)]:
                begin = (
                    row.meaning[0].upper() if row.meaning[:2].isalpha() else row.meaning[0]
                )  # formulas stay as they are
                yield f"\n### {name}={built_in}\n\n{begin}{row.meaning[1:]}\n"
                yield from _keys(name, own, {key: _default(own, key) for key in meanings(own)}, {}, further)
    for group, meaning in FURTHER.items():
        yield f"\n## {group}\n\n{meaning}\n"
        yield from _table(group, options)


def _differs(key: str, own: type, kind: type) -> bool:
    """Whether a built-in component adds a key to its group, or changes the key's default."""
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
    """Yield the table of a group's options: meaning, chosen options, keys set."""
    inside = [each for each in options.values() if (each.group + "/").startswith(f"{group}/")]
    if not inside:
        return
    yield "| option | meaning | chooses and sets |\n|---|---|---|"
    for option in inside:
        name = f"{'+' * (group in ('sweep', 'control'))}{option.group}={option.name}"
        of_row = option.group in conf_files.COMPONENTS  # their keys have a table of their own
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
    """Yield the table of a dataclass's keys, of all or only of `names`."""
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
    """Return key -> meaning for a dataclass of the schema.

    Options of a row carry their meaning as metadata. The choices of a method take it from the arguments of the engine's
    classes, all other keys from the docstring below the field.
    """
    found = {each.name: str(each.metadata.get("meaning", "")) for each in fields(kind)}
    if axis := getattr(kind, "AXIS", None):
        return found | _arguments(axis)
    for each in reversed(kind.__mro__):
        if not is_dataclass(each) or all(found.values()):
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(tree, ast.ClassDef)
        for first, second in pairwise(tree.body):
            if isinstance(first, ast.AnnAssign) and isinstance(second, ast.Expr) and isinstance(first.target, ast.Name):
                found[first.target.id] = found.get(first.target.id) or " ".join(ast.literal_eval(second.value).split())
    return found


def _arguments(kind: type) -> dict[str, str]:
    """Return argument -> meaning from a class's docstring."""
    said = re.search(r"Args:\n(.*?)\n(?=\n|$)", f"{inspect.getdoc(kind)}\n\n", re.DOTALL)
    assert said is not None
    told = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", said[1], re.DOTALL | re.MULTILINE)
    texts = {name: " ".join(text.split()) for name, text in told}
    return {name: f"{text[0].upper()}{text[1:]}" for name, text in texts.items()}


def _default(kind: type, name: str) -> Any:
    (each,) = [each for each in fields(kind) if each.name == name]
    return each.default if each.default_factory is MISSING else each.default_factory()


def _values(kind: type, name: str) -> str:
    """Return the type and the rules of a key."""
    hint = fields_of(kind)[name].type
    said = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    text = re.sub(r"\bNone\b", "null", said.replace("typing.", "")).replace("Any", "any").replace(" | ", "` or `")
    axis = get_type_hints(kind.AXIS).get(name) if hasattr(kind, "AXIS") else None
    literal = next((each for each in (axis, *get_args(axis)) if get_origin(each) is Literal), None)
    rules = [f"one of {', '.join(get_args(literal))}"] if literal else []
    for rule in fields_of(kind)[name].metadata.get("rules", ()):
        # remedies and asides are cut off; an interval such as (0, 1) stays
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
