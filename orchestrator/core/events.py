"""What happens to the stages of a sweep, and who makes it happen or watches. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.core.plain_data import Count, Margin, Seconds
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown, shown_tree
from orchestrator.core.specs import Plan

EventKind = Literal["started", "finished", "failed", "killed", "retried"]


@dataclass(frozen=True)
class Failure:
    """Why a stage did not finish: a sentence, the remote traceback, where the log is, and whether a retry may help.

    All texts are as people may be shown them.
    """

    message: str
    traceback: str = ""
    log: str = ""
    host: str = ""
    transient: bool = False
    fatal: bool = False
    """Whether no other trial can do better, as where the store is full: the sweep stops."""
    repeats: bool = False
    """Whether the same stage fails so each time, on the same processor with the same releases."""

    def __post_init__(self) -> None:
        """Redact: what failed may quote what it was given."""
        for name in ("message", "traceback", "log", "host"):
            object.__setattr__(self, name, shown(getattr(self, name)))


@dataclass(frozen=True)
class StageEvent:
    """Something that happened to a stage, at `time` (Unix seconds): what executors yield and trackers record.

    `finished` carries the record, `failed` and `killed` the failure. A stage that fails fails the stages below it:
    the executor yields a `failed` event for each of those too, with the cause.
    """

    kind: EventKind
    key: str
    time: float
    record: StageRecord | None = None
    failure: Failure | None = None
    attempt: int = 1
    reached: int = -1
    """Of `retried`: the step of the checkpoint that it goes on from, -1 where there is none."""


@dataclass(frozen=True)
class Amount:
    """A sum over stages: of those of which it is known, and how many it is not known of."""

    known: Margin = 0.0
    unknown: Count = 0


@dataclass(frozen=True)
class Forecast:
    """What a run was expected to take as it began, from what was finished then. Plain data, saved with the sweep."""

    made: Seconds
    """Unix seconds."""
    stages: Count
    """Left to run."""
    work: Amount
    """Seconds, one stage after the other."""
    wall: Amount
    """Seconds to the end of the run, on `slots`."""
    slots: Count | None
    """How many stages run at once; None where that was not known, and `wall` with it."""
    steps: Amount
    """Optimizer steps."""
    bytes: Amount
    """By which the store grows."""
    shared: Margin = 0.0
    """Seconds that sharing saves against each trial running by itself."""
    done: Margin = 0.0
    """Seconds that stages took which had finished."""
    basis: str = ""
    """A sentence: from what it was estimated, or why it was not."""
    ended: Seconds | None = None
    """Unix seconds at which the run ended; None where it has not, or was killed."""


@dataclass(frozen=True)
class SweepInfo:
    """What views and the store are told of the sweep as a whole, as people may be shown it."""

    name: str
    config: Mapping[str, Any]
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    forecast: Forecast | None = None
    """Of the last run that had something to do; None where there was none, or a release without forecasts saved it."""

    def __post_init__(self) -> None:
        """Redact."""
        object.__setattr__(self, "config", shown_tree(self.config))
        object.__setattr__(self, "command", shown(self.command))
        object.__setattr__(self, "environment", shown_tree(self.environment))


class Tracker:
    """Keeps a view of the sweep for people; this one keeps none."""

    complete = True
    """Whether the view holds all that was recorded; known once `finish` has returned."""

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view: one parent for the sweep, one child for each trial, stages in `finished` already filled in."""

    def record(self, event: StageEvent) -> None:
        """Take one event; return at once, never raise for a view that is away."""

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view: statuses, the report's files (relative path -> content), everything flushed."""
