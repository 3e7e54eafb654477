"""Which trials belong together: panels (model and data), lines (all but seed and sparsity), and what to call them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.config.settings import as_typed, settings_of, varying
from orchestrator.core.canonical import canonical_json
from orchestrator.core.specs import Plan, TrialSpec

POINT_SETTINGS = ("schedule.sparsity", "schedule.amount")
"""What moves a trial along its line."""

_DENSE = ("model.", "data.", "train.", "device", "threads")
"""What a dense network depends on, but its seed."""
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
    dense_label: str
    """What to call it: "dense", and as much as it takes to tell the dense networks of a panel apart."""
    seed: int


def places(plan: Plan) -> tuple[Place, ...]:
    """Return the place of each trial of `plan`, in order.

    Trials are on one line when everything that their results depend on is equal, but the seed and the sparsity (or
    amount) asked for. Labels name the method, and as much else as it takes to tell the lines of a panel apart.
    """
    found = [_identify(plan, trial) for trial in plan.trials]
    dense = [canonical_json({k: v for k, v in _fields(plan, trial).items() if k != "seed"}) for trial in plan.trials]
    labels: dict[tuple[str, str], dict[str, str]] = {}
    dense_labels: dict[tuple[str, str], dict[str, str]] = {}
    for panel in dict.fromkeys(panel for panel, _, _ in found):
        lines: dict[str, Mapping[str, Any]] = {}
        networks: dict[str, Mapping[str, Any]] = {}
        for (other, line, settings), network in zip(found, dense, strict=True):
            if other == panel:
                lines.setdefault(line, settings)
                networks.setdefault(network, {k: v for k, v in settings.items() if k.startswith(_DENSE)})
        methods = [str(each.get("method.name", each.get("method._target_", "trial"))) for each in lines.values()]
        labels[panel] = dict(zip(lines, _labels(methods, list(lines.values())), strict=True))
        unpruned = _labels(["dense"] * len(networks), list(networks.values()))
        dense_labels[panel] = dict(zip(networks, unpruned, strict=True))
    return tuple(
        Place(
            panel=panel,
            line=labels[panel][line],
            method=str(settings.get("method.name", settings.get("method._target_", ""))),
            schedule=str(settings.get("schedule.kind", "")),
            point=canonical_json([line, [as_typed(settings.get(name)) for name in POINT_SETTINGS]]),
            dense=network,
            dense_label=dense_labels[panel][network],
            seed=int(trial.config.get("seed", 0)),
        )
        for trial, (panel, line, settings), network in zip(plan.trials, found, dense, strict=True)
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


def _labels(labels: list[str], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the labels of lines, those that are alike made longer by the settings in which the lines differ."""
    names = [name for name in varying(lines) if name not in ("seed", *POINT_SETTINGS)]
    named = {name.rpartition(".")[0] for name in names if name.endswith(".name")}
    order = [name for name in _NAMES if name in names]
    order += [name for name in names if name.endswith("._target_") and name.removesuffix("._target_") not in named]
    order += [name for name in names if name not in order and not name.endswith("_target_")]
    told = _short(order)
    for name in order:
        values: dict[str, set[str]] = {}
        for label, line in zip(labels, lines, strict=True):
            values.setdefault(label, set()).add(as_typed(line.get(name)))
        labels = [
            f"{label}, {_told(name, told[name], line)}" if len(values[label]) > 1 else label
            for label, line in zip(labels, lines, strict=True)
        ]
    seen: dict[str, int] = {}
    for position, label in enumerate(labels):
        seen[label] = seen.get(label, 0) + 1
        if seen[label] > 1:  # they differ in their source code only
            labels[position] = f"{label} #{seen[label]}"
    return labels


def _short(names: Sequence[str]) -> dict[str, str]:
    """Return a word for each setting: `lr`, but `train.optimizer.lr` where that of `finetune` differs as well."""
    words = {name: name.removesuffix("._target_").rpartition(".")[2] for name in names}
    counts = Counter(words.values())
    return {name: word if counts[word] == 1 else name.removesuffix("._target_") for name, word in words.items()}


def _told(name: str, word: str, line: Mapping[str, Any]) -> str:
    value = as_typed(line.get(name))
    if name.endswith("._target_"):
        return f"{word}={value.rpartition('.')[2]}"
    return value if name == "schedule.kind" else f"{word}={value}"
