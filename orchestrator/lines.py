"""Which trials belong together: panels (model and data), lines (all but seed and sparsity), and what to call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.records import Plan, TrialSpec, canonical_json
from orchestrator.settings import as_typed, settings_of, varying

POINT_SETTINGS = ("schedule.sparsity", "schedule.amount")
"""What moves a trial along its line."""

_NAMES = ("method.name", "schedule.kind", "schedule.rounds", "model.name", "data.name")


@dataclass(frozen=True)
class Place:
    """Where a trial belongs: its panel, its line in that panel, and its point on the line."""

    panel: tuple[str, str]
    """Names of model and data set."""
    line: str
    """The label of the line, unique within the panel."""
    method: str
    schedule: str
    point: str
    """Identity of the point: equal for trials that differ in nothing but the seed."""
    dense: str
    """Identity of the dense configuration: equal for trials whose dense networks differ in nothing but the seed."""
    seed: int


def places(plan: Plan) -> tuple[Place, ...]:
    """Return the place of each trial of `plan`, in order.

    Trials are on one line when everything that their results depend on is equal, but the seed and the sparsity (or
    amount) asked for. Labels name the method, and as much else as it takes to tell the lines of a panel apart.
    """
    found = [_identify(plan, trial) for trial in plan.trials]
    labels: dict[tuple[str, str], dict[str, str]] = {}
    for panel in dict.fromkeys(panel for panel, _, _ in found):
        lines: dict[str, Mapping[str, Any]] = {}
        for other, line, settings in found:
            if other == panel:
                lines.setdefault(line, settings)
        labels[panel] = dict(zip(lines, _labels(list(lines.values())), strict=True))
    return tuple(
        Place(
            panel=panel,
            line=labels[panel][line],
            method=str(settings.get("method.name", settings.get("method._target_", ""))),
            schedule=str(settings.get("schedule.kind", "")),
            point=canonical_json([line, [as_typed(settings.get(name)) for name in POINT_SETTINGS]]),
            dense=canonical_json({k: v for k, v in _fields(plan, trial).items() if k != "seed"}),
            seed=int(trial.config.get("seed", 0)),
        )
        for trial, (panel, line, settings) in zip(plan.trials, found, strict=True)
    )


def _identify(plan: Plan, trial: TrialSpec) -> tuple[tuple[str, str], str, dict[str, Any]]:
    fields = _fields(plan, trial)
    settings = settings_of(trial.config) | {name: fields[name] for name in ("device", "threads") if name in fields}
    panel = (str(settings.get("model.name", "model")), str(settings.get("data.name", "data")))
    moving = {"seed", *POINT_SETTINGS}
    line = {name: as_typed(value) for name, value in settings.items() if name not in moving}
    sources = [plan.stages[key].fields.get("sources") for key in trial.stages[:2]]
    return panel, canonical_json([line, sources]), settings


def _fields(plan: Plan, trial: TrialSpec) -> Mapping[str, Any]:
    return plan.stages[trial.stages[0]].fields


def _labels(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name each line by its method, and lines that are named alike by the settings in which they differ as well."""
    names = varying(lines)
    order = [name for name in _NAMES if name in names]
    order += [name for name in names if name not in (*order, "seed", *POINT_SETTINGS) and not name.endswith("_target_")]
    labels = [str(line.get("method.name", line.get("method._target_", "trial"))) for line in lines]
    for name in order:
        values: dict[str, set[str]] = {}
        for label, line in zip(labels, lines, strict=True):
            values.setdefault(label, set()).add(as_typed(line.get(name)))
        labels = [
            f"{label}, {_told(name, line)}" if len(values[label]) > 1 else label
            for label, line in zip(labels, lines, strict=True)
        ]
    seen: dict[str, int] = {}
    for position, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:  # they differ in their source code only
            labels[position] = f"{label} #{seen[label]}"
    return labels


def _told(name: str, line: Mapping[str, Any]) -> str:
    value = as_typed(line.get(name))
    return value if name == "schedule.kind" else f"{name.rpartition('.')[2]}={value}"
