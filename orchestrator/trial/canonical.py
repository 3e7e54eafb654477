"""Canonical form of a configuration's parts: the settings that stand in a stage's key.

A setting stands in a key if the result can depend on it. Each field of the configuration says itself when it does:

- fields of a training by `unread` (`orchestrator.config.key_rules.Unread`);
- fields of a unit or a scope by `units`, the kinds of units that read the field (`pruning.choices.axes`);
- these fields, and options of catalogue rows, by `later`: added after results were stored, absent at their defaults.

`LABELS` are in no key.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any

from orchestrator.config.config_groups import GROUPS
from orchestrator.config.key_rules import Unread
from orchestrator.config.sources import LABELS
from orchestrator.config.training import Train
from pruning.choices import axes

_DEFAULTS = Train()
TRAININGS = ("train", "finetune")
AXES: Mapping[str, type] = {"unit": axes.Unit, "scope": axes.Scope}
"""Parts whose settings are those of a choice of the engine."""
UNREAD: Mapping[str, Unread] = {each.name: found for each in fields(Train) if (found := each.metadata.get("unread"))}
"""Setting of a training that is not always read -> when it is not."""


def canonical(config: Mapping[str, Any], names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return these parts of a trial's configuration as they stand in a key."""
    return {name: _canonical_part(name, config) for name in names}


def outside_keys(training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a training that are never in a key, for the worker."""
    return {name: training[name] for name, unread in UNREAD.items() if unread.unless is None}


def _canonical_part(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    node = config[name]
    if name in TRAININGS:
        return dict(_training(node))
    if name in AXES:
        read = _read_by(AXES[name], config["unit"]["kind"])
        return {key: node[key] for key, absent in read.items() if key in node and node[key] != absent}
    options = GROUPS[name].options(GROUPS[name].rows.get(str(node.get("kind")))) if name in GROUPS else ()
    later = {option.name: option.default for option in options if option.later}
    absent = LABELS | {key for key, default in later.items() if key in node and node[key] == default}
    return {key: value for key, value in node.items() if key not in absent}


def _training(node: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in node.items():
        unread = UNREAD.get(name)
        if name not in LABELS and (unread is None or (unread.unless and node[unread.unless] is not None)):
            yield name, value
        elif unread is not None and unread.at_default:
            yield name, getattr(_DEFAULTS, name)


@cache
def _read_by(axis: type, unit: str) -> dict[str, Any]:
    """Return the fields of a choice of the engine that a kind of unit reads -> the value at which each is absent."""
    read = (each for each in fields(axis) if unit in each.metadata.get("units", (unit,)))
    return {each.name: each.default if each.metadata.get("later") else MISSING for each in read}
