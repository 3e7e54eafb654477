"""Flat, dotted settings of a trial's resolved config, without circumstances; the axes of a sweep."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from orchestrator.config.config_groups import GROUPS
from orchestrator.core.redact import redact_tree

CIRCUMSTANCES = frozenset(
    {
        "name",
        "objective",
        "deploy",
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
