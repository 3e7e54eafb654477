"""Versions of our own code that can change bits, one for each component: they are part of every stage's key.

A built-in component's version is in its row of a catalogue. A test holds each component's code to its version, and says
what to do where they differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.config.groups import GROUPS

SHARED: Mapping[str, int] = {"training": 6, "round": 4, "deploy": 2}
"""`training`: building, splitting, training and evaluating, in every stage; `round`: pruning; `deploy`: shrinking and
measuring."""


def version_of(component: str) -> int:
    """Return the version of a component, as in "round" or "score/snip"."""
    group, _, kind = component.partition("/")
    return GROUPS[group].rows[kind].version if kind else SHARED[component]


def components() -> list[str]:
    """Return every component that has a version."""
    rows = [f"{name}/{kind}" for name, group in GROUPS.items() for kind, row in group.rows.items() if row.code]
    return [*SHARED, *rows]


def versions_of(parts: Mapping[str, Any]) -> dict[str, int]:
    """Return the versions of the components that a stage with these parts of a configuration uses."""
    used = ["training", *(["round"] if "method" in parts else [])]
    kinds = {group: parts.get(group, {}).get("kind") for group in GROUPS}
    used += [f"{group}/{kind}" for group, kind in kinds.items() if kind and GROUPS[group].rows[kind].code]
    return {component: version_of(component) for component in used}
