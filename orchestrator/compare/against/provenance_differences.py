"""Differences between two sweeps that settings do not show: code, pinned content, releases, machines. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.compare.against.pairing import Side
from orchestrator.compare.trial_settings import SettingsOfEach, as_typed

MOVING = ("seed", "target", "amount", "round", "inner", "until", "restart")
"""Stage fields that distinguish the stages and trials of one line."""
DECIDING = ("processor", "torch", "numpy", "gpu")
"""Environment entries that affect results."""
SHOWN = 12
"""Characters shown of a digest."""


def differences_beyond_settings(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Return name -> value in the first sweep and in the second, for everything that differs besides settings.

    From stage keys: versions of built-in components, the user's own sources, pinned content, device and threads. From
    environments: releases, the git commit, processors.
    """
    found: dict[str, tuple[str, str]] = {}
    ours, theirs = (_in_keys(side) for side in (first, second))
    for name, values in ours.items():
        others = theirs.get(name, values)
        if values != others and len(values) == len(others) == 1:
            found[name] = (_short(*values), _short(*others))
    before, now = first.sweep.info.environment, second.sweep.info.environment
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            found[name] = (_short(before.get(name, "")), _short(now.get(name, "")))
    for name in DECIDING:
        places = [_places(side, name) for side in (first, second)]
        if places[0] != places[1] and all(places):
            found[name] = (", ".join(places[0]), ", ".join(places[1]))
    return found


def _in_keys(side: Side) -> dict[str, set[str]]:
    """Return field -> its values, over the dense and round stages."""
    found: dict[str, set[str]] = {}
    specs = [spec for spec in side.sweep.plan.stages.values() if spec.kind in ("dense", "round")]
    parts = [{name: value for name, value in spec.fields.items() if name not in MOVING} for spec in specs]
    for fields in _each_once(parts):
        for name, value in fields.items():
            found.setdefault(name.removeprefix("sources."), set()).add(as_typed(value))
    return found


def _each_once(parts: Iterable[Mapping[str, Any]]) -> Iterable[Mapping[str, Any]]:
    """Flatten fields into settings, equal objects once: stages of a loaded plan share parts of configurations."""
    distinct = {tuple((name, id(value)) for name, value in fields.items()): fields for fields in parts}
    return SettingsOfEach(list(distinct.values()))


def _places(side: Side, name: str) -> list[str]:
    return sorted({record.environment[name] for record in side.sweep.records.values() if name in record.environment})


def _short(value: str) -> str:
    is_digest = len(value) in (40, 64) and all(letter in "0123456789abcdef" for letter in value)
    return value[:SHOWN] if is_digest else value
