"""Files of conf/ made from rows of the catalogues: networks, data sets, tasks and methods, for people to read."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from orchestrator.config.config_groups import GROUPS
from pruning.catalogue.methods import METHODS
from pruning.catalogue.presets import SCOPES, UNITS, Preset
from pruning.catalogue.rows import Row
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED, Method

COMPONENTS = ("model", "data", "task")
"""Groups with one file for each row."""
MADE = "# Made from its row in {} by `python -m scripts.reference`."
HOMES = {
    **{name: f"orchestrator/catalogue/{name if name == 'data' else f'{name}s'}.py" for name in COMPONENTS},
    "method": "pruning/choices/published.py",
}
"""Group -> the catalogue of its files."""


def files() -> dict[str, str]:
    """Return the path below conf/ -> the content, for each file."""
    found = {f"{group}/{row.name}.yaml": _component(group, row) for group in COMPONENTS for row in _rows(group)}
    return found | {f"method/{method.name}.yaml": _method(method) for method in PUBLISHED.values()}


def write(conf: Path) -> None:
    """Write the files below the folder `conf`."""
    for path, content in files().items():
        (conf / path).write_text(content, encoding="utf-8")


def _rows(group: str) -> Iterator[Row]:
    yield from GROUPS[group].rows.values()


def _component(group: str, row: Row) -> str:
    extra = f" Needs pip install 'pruning-orchestrator[{row.extra}]'." if row.extra else ""
    own = {option.name for option in row.options} | set(row.in_sweeps)
    lines = [*_comment(f"{row.meaning}{extra}"), MADE.format(HOMES[group])]
    lines += ["defaults:", f"  - /hydra/schema/{group}/{row.name}@_here_", "  - _self_", f"kind: {row.name}"]
    for option in GROUPS[group].options(row):
        if option.name in own:
            lines += _setting(option.name, option.default, option.meaning)
    return "\n".join(lines) + "\n"


def _setting(name: str, value: Any, meaning: str) -> list[str]:
    line, said = f"{name}: {_yaml(value)}", meaning.rstrip(".")
    if len(line) + len(said) + 3 <= 120:
        return [f"{line} # {said}"]
    return [*_comment(said), line]


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text, 120, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def _method(method: Method) -> str:
    choices = method.choices
    row = METHODS.get(str(choices.select)) if isinstance(choices.select, str) else None
    said = ": ".join(filter(None, (method.paper, method.meaning)))
    lines = ["# @package _global_", *_comment(said), MADE.format(HOMES["method"]), "defaults:"]
    lines += [f"  - /hydra/schema/method/{row.name if row and row.options else 'base'}@method"]
    chosen, left = _options(choices, of_class=row is not None)
    chosen |= {group: name for group, name in (("schedule", method.schedule), ("restart", method.restart)) if name}
    lines += [f"  - override /{group}: {name}" for group, name in chosen.items()]
    lines += ["  - _self_", "method:"]
    if row is None or row.name != method.name:
        lines.append(f"  name: {method.name}")
    if row is not None:
        lines.append(f"  kind: {row.name}")
        lines += [f"  {name}: {_yaml(value)}" for name, value in row.in_sweeps.items()]
    for group, values in left.items():
        lines += [f"{group}:", *(f"  {name}: {_yaml(value)}" for name, value in values.items())]
    return "\n".join(lines) + "\n"


def _options(choices: Choices, *, of_class: bool) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
    """Return group -> overridden option, and group -> values that no option sets."""
    chosen: dict[str, str] = {}
    left: dict[str, dict[str, Any]] = {}
    for group, presets in (("unit", UNITS), ("scope", SCOPES)):
        choice = getattr(choices, group)
        if choice == type(choice)() or (group == "unit" and of_class):  # a class chooses its own unit
            continue
        chosen[group], values = _preset(choice, presets)
        left |= {group: values} if values else {}
    plain = Choices()
    for group in ("score", "dynamics", "repair"):
        if (kind := getattr(choices, group).kind) != getattr(plain, group).kind:
            chosen[group] = str(kind)
    return dict(sorted(chosen.items(), key=lambda item: list(vars(plain)).index(item[0]))), left


def _preset(choice: Any, presets: Mapping[str, Preset]) -> tuple[str, dict[str, Any]]:
    """Return the preset nearest to a choice, and the values of the choice that differ from the preset."""

    def differences(preset: Preset) -> dict[str, Any]:
        own = vars(type(choice)()) | preset.sets
        return {name: value for name, value in vars(choice).items() if value != own[name]}

    of_kind = {name: differences(preset) for name, preset in presets.items() if preset.sets["kind"] == choice.kind}
    name = min(of_kind, key=lambda each: len(of_kind[each]))
    return name, of_kind[name]
