"""Content of a tracked run, with names and texts that MLflow accepts. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from orchestrator.core.redact import shown

_ODD = re.compile(r"[^/\w.\- ]")


class Point(NamedTuple):
    """One point of a metric; `time` is in Unix seconds."""

    key: str
    value: float
    time: float
    step: int


@dataclass
class Content:
    """Content to write to one run: everything, or what the run lacks. Times are in Unix seconds."""

    status: str = "RUNNING"
    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """File of the run -> key of the stage with its masks."""
    start: float | None = None
    end: float | None = None
    new_run: bool = False
    """Whether a new run is needed: the old one holds another execution of a stage, and points cannot be deleted."""

    def shown(self) -> Content:
        """Return the content with texts made safe to display and names that MLflow accepts."""
        params, tags = ({key_of(name): shown(text) for name, text in of.items()} for of in (self.params, self.tags))
        return replace(self, params=params, tags=tags)


def key_of(name: str) -> str:
    """Return a name as MLflow accepts it for a parameter, a tag or a metric."""
    return _ODD.sub("_", shown(name))
