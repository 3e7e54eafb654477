"""Panels (equal model and data set) and lines (equal settings but seed and sparsity) of trials, and their labels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from orchestrator.compare.trial_settings import SettingsOfEach, as_typed, name_of, varying
from orchestrator.config import round_amounts
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.specs import Plan, TrialSpec

POINT_SETTINGS = ("schedule.sparsity", "schedule.amount")
"""Settings that move a trial along its line."""
_MOVING = ("seed", "target", "amount")
"""Stage fields that move a trial along its line or repeat it."""

DENSE_SETTINGS = ("model.", "data.", "task.", "train.", "device", "threads")
"""Settings that affect a dense network, besides its seed."""
CONTROL = "restart.control"
"""Setting that only a trial's last round carries; the stages that identify the line do not have it."""
FILE = f"scope.{round_amounts.KEY}"
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
    return str(trial.config.get("scope", {}).get(round_amounts.KEY) or "")


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
