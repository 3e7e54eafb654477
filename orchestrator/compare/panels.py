"""Panels (equal model and data set) and lines (equal settings but seed and sparsity) of trials, and their labels."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from orchestrator.config import round_schema
from orchestrator.config.config_groups import GROUPS
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.redact import redact_tree
from orchestrator.core.specs import Plan, TrialSpec

CIRCUMSTANCES = frozenset(
    {
        "name",
        "objective",
        "deploy",
        "harness",
        "tracking",
        "store",
        "cluster",
        "compare",
        "search",
        "hydra",
        "dry_run",
        "retry_failed",
    }
)
"""Top-level keys about where and why a trial runs and what is done with it, not about what the trial is: a sweep that
has run can be deployed later, and is still the same sweep."""


class SettingsOfEach:
    """Flat settings that define each trial: its config without circumstances, secrets redacted.

    They are merged when they are asked for, as those of 100,000 trials would take gigabytes. A part that many configs
    share as one object, as in a loaded plan, is flattened once.

    Args:
        configs: config of each trial
        form: changes the flat settings of a part
    """

    def __init__(
        self, configs: Iterable[Mapping[str, Any]], form: Callable[[dict[str, Any]], dict[str, Any]] = dict
    ) -> None:
        known: dict[tuple[str, int], dict[str, Any]] = {}
        self._parts: list[list[dict[str, Any]]] = []
        for config in [*configs]:  # all of them at once, as parts are known by their identity
            parts = [(key, value) for key, value in config.items() if key not in CIRCUMSTANCES]
            for key, value in parts:
                if (key, id(value)) not in known:
                    known[key, id(value)] = form(dict(_flat({key: value})))
            self._parts.append([known[key, id(value)] for key, value in parts])

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Return the settings of a trial, as a new dict."""
        return {name: value for part in self._parts[index] for name, value in part.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(self.__getitem__, range(len(self._parts)))


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested dict as (`group.key`, value); a list is a leaf, an empty dict has none."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        else:
            (redacted,) = redact_tree({name: value}).values()
            yield name, redacted


def name_of(setting: str) -> str:
    """Return the setting with the name of a built object: `method.kind` -> `method.name`; empty for other settings."""
    group, _, last = setting.rpartition(".")
    builds = last == "_target_" or (last == "kind" and group in GROUPS)
    return f"{group}.name" if group and builds else ""


def as_typed(value: Any) -> str:
    """Format `value` as it is typed in an override: `null`, `true`, `0.9`, `[1,2]`."""
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"), default=str)


def varying(settings: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the axes of a sweep: settings that differ or that only some trials have, in order of first appearance."""
    missing = object()
    first: dict[str, Any] = {}
    differ: set[str] = set()
    for index, each in enumerate(settings):
        for name in {**first, **each}:
            value = each.get(name, missing)
            known = first.setdefault(name, value if index == 0 else missing)
            if value is known or name in differ:  # mostly so, because configurations share parts
                continue
            if value is missing or known is missing or as_typed(value) != as_typed(known):
                differ.add(name)
    return tuple(name for name in first if name in differ)


POINT_SETTINGS = ("schedule.sparsity", "schedule.amount")
"""Settings that move a trial along its line."""
_MOVING = ("seed", "target", "amount")
"""Stage fields that move a trial along its line or repeat it."""

DENSE_SETTINGS = ("model.", "data.", "task.", "train.", "device", "threads")
"""Settings that affect a dense network, besides its seed."""
CONTROL = "restart.control"
"""Setting that only a trial's last round carries; the stages that identify the line do not have it."""
FILE = f"scope.{round_schema.KEY}"
_NAMES = ("method.name", "schedule.kind", "schedule.rounds", "model.name", "data.name")


@dataclass(frozen=True)
class Position:
    """Place of a trial in a comparison: its panel, its line in that panel, and its point on the line."""

    panel: tuple[str, str]
    """Names of model and data set."""
    line: str
    """Label of the line, unique within the panel."""
    method: str
    schedule: str
    point: tuple[tuple[str, str], str, str]
    """Identity of the point: equal for trials that differ only in the seed."""
    dense: str
    """Identity of the dense configuration: equal for trials whose dense networks differ only in the seed."""
    dense_label: str
    """Label of the dense configuration: "dense", and the settings that distinguish it within the panel."""
    seed: int


@dataclass(frozen=True)
class _Trial:
    panel: tuple[str, str]
    line: str
    dense: str
    settings: Mapping[str, Any]


def positions(plan: Plan) -> tuple[Position, ...]:
    """Return the position of each trial of `plan`, in order.

    Trials are on one line if everything that affects their results is equal, except the seed and the requested
    sparsity (or amount). Labels name the method, and the settings that distinguish the lines of a panel.
    """
    described = _described(plan)
    each = zip(plan.trials, SettingsOfEach(trial.config for trial in plan.trials), strict=True)
    trials = [_identified(plan, trial, settings, described) for trial, settings in each]
    line_labels: dict[tuple[tuple[str, str], str], str] = {}
    dense_labels: dict[tuple[tuple[str, str], str], str] = {}
    for panel in dict.fromkeys(trial.panel for trial in trials):
        lines: dict[str, Mapping[str, Any]] = {}
        networks: dict[str, Mapping[str, Any]] = {}
        for trial in trials:
            if trial.panel == panel:
                lines.setdefault(trial.line, trial.settings)
                networks.setdefault(trial.dense, trial.settings)
        methods = [_name(settings, "method", "trial") for settings in lines.values()]
        labels = _labels(methods, list(lines.values()))
        line_labels |= {(panel, line): label for line, label in zip(lines, labels, strict=True)}
        own = [{k: v for k, v in settings.items() if k.startswith(DENSE_SETTINGS)} for settings in networks.values()]
        labels = _labels(["dense"] * len(networks), own)
        dense_labels |= {(panel, network): label for network, label in zip(networks, labels, strict=True)}
    return tuple(
        Position(
            panel=trial.panel,
            line=line_labels[trial.panel, trial.line],
            method=_name(trial.settings, "method"),
            schedule=str(trial.settings.get("schedule.kind", "")),
            point=(trial.panel, trial.line, spec.identity),
            dense=trial.dense,
            dense_label=dense_labels[trial.panel, trial.dense],
            seed=int(spec.config.get("seed", 0)),
        )
        for spec, trial in zip(plan.trials, trials, strict=True)
    )


def _described(plan: Plan) -> dict[str, str]:
    """Return stage key -> digest of the fields that identify a line, for the first stages of each trial."""
    found: dict[str, str] = {}
    filed = {key for trial in plan.trials if _densities_file(trial) for key in trial.stages}
    parts: dict[int, str] = {}  # by identity: stages of a loaded plan share parts of their configurations
    for key in dict.fromkeys(key for trial in plan.trials for key in (trial.dense, *trial.stages[:2])):
        spec = plan.stages[key]
        fields = {name: value for name, value in spec.fields.items() if name not in _MOVING}
        if key in filed and "scope" in fields:
            fields["scope"] = {name: value for name, value in fields["scope"].items() if name != "densities"}
        for value in fields.values():
            if id(value) not in parts:
                parts[id(value)] = canonical_json(value)
        found[key] = digest(canonical_json([spec.kind, {name: parts[id(value)] for name, value in fields.items()}]))
    return found


def _identified(plan: Plan, trial: TrialSpec, settings: dict[str, Any], described: Mapping[str, str]) -> _Trial:
    """Identify a trial's line and dense network by its stages' fields, because settings are redacted."""
    dense = plan.stages[trial.dense]
    settings |= {"device": dense.typed.device, "threads": dense.typed.threads}
    if file := _densities_file(trial):  # its densities move a trial along its line, as the sparsity does
        settings = {name: value for name, value in settings.items() if not name.startswith("scope.densities.")}
    shown = {name: as_typed(value) for name, value in settings.items() if _is_shown(name)}
    if (control := settings.get(CONTROL, "none")) != "none":
        shown[CONTROL] = control
    if file:
        shown[FILE] = file
    stages = [described[key] for key in dict.fromkeys((trial.dense, *trial.stages[:2]))]
    return _Trial(
        panel=(_name(settings, "model", "model"), _name(settings, "data", "data")),
        line=digest(canonical_json([shown, stages])),
        dense=described[trial.dense],
        settings=settings,
    )


def _densities_file(trial: TrialSpec) -> str:
    """Return the file with the densities of a trial, empty if there is none."""
    return str(trial.config.get("scope", {}).get(round_schema.KEY) or "")


@cache
def _is_shown(setting: str) -> bool:
    """Whether a setting distinguishes lines even if no stage depends on it: names, and the form of the schedule."""
    return setting not in (*POINT_SETTINGS, "schedule.at") and (
        setting.startswith("schedule.") or setting.endswith(".name")
    )


def _name(settings: Mapping[str, Any], group: str, default: str = "") -> str:
    """Name of a model, data set or method, else its kind or the function that builds it."""
    return str(
        next((found for key in ("name", "kind", "_target_") if (found := settings.get(f"{group}.{key}"))), default)
    )


def _labels(labels: list[str], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Append to equal labels the settings in which their lines differ, until labels are unique."""
    names = [name for name in varying(lines) if name not in ("seed", *POINT_SETTINGS)]
    order = [name for name in _NAMES if name in names]
    order += [name for name in names if name_of(name) and name_of(name) not in names]
    order += [name for name in names if name not in order and not name_of(name)]
    words = _short(order)
    for name in order:
        values: dict[str, set[str]] = {}
        for label, line in zip(labels, lines, strict=True):
            values.setdefault(label, set()).add(as_typed(line.get(name)))
        labels = [
            f"{label}, {_setting(name, words[name], line)}" if len(values[label]) > 1 else label
            for label, line in zip(labels, lines, strict=True)
        ]
    seen: dict[str, int] = {}
    for position, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:  # the lines differ only in source code or in redacted settings
            labels[position] = f"{label} #{seen[label]}"
    return labels


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return setting -> short name: `lr`, or `train.optimizer.lr` if `finetune.optimizer.lr` is a setting too."""
    paths = {name: (name_of(name) or name.removesuffix(".kind")).removesuffix(".name") for name in names}
    counts = Counter(path.rpartition(".")[2] for path in paths.values())
    words = {name: path.rpartition(".")[2] for name, path in paths.items()}
    return {name: word if counts[word] == 1 else paths[name] for name, word in words.items()}


def _setting(name: str, word: str, line: Mapping[str, Any]) -> str:
    value = as_typed(line.get(name))
    if name_of(name):
        return f"{word}={value.rpartition('.')[2]}"
    return value if name == "schedule.kind" else f"{word}={value}"
