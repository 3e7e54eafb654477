"""What is written to one tracked run, and the names and texts that MLflow gets. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from orchestrator.core.redact import shown

_ODD = re.compile(r"[^/\w.\- ]")


class Point(NamedTuple):
    """One point of a metric; `time` is Unix time."""

    key: str
    value: float
    time: float
    step: int


@dataclass
class Content:
    """What is to be written to one run: all, or what it lacks. Times are Unix times."""

    status: str = "RUNNING"
    points: list[Point] = field(default_factory=list)
    params: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    masks: dict[str, str] = field(default_factory=dict)
    """File of the run -> key of the stage whose masks it holds."""
    start: float | None = None
    end: float | None = None
    anew: bool = False
    """Whether the run there is holds another execution of a stage, whose points cannot be taken back."""

    def shown(self) -> Content:
        """Return the content with texts as people may be shown them, under names that MLflow takes."""
        params, tags = ({key_of(name): shown(text) for name, text in of.items()} for of in (self.params, self.tags))
        return replace(self, params=params, tags=tags)


def key_of(name: str) -> str:
    """Return a name as MLflow takes it for a parameter, a tag or a metric."""
    return _ODD.sub("_", shown(name))
