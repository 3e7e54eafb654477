"""Events, failures and forecasts of a sweep, and the interface of trackers. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from orchestrator.core.plain_data import Count, Margin, Number, Seconds, Sha256
from orchestrator.core.records import NOWHERE, Reached, StageRecord
from orchestrator.core.redact import shown, shown_tree
from orchestrator.core.specs import Plan

EventKind = Literal["started", "finished", "failed", "killed", "retried"]


@dataclass(frozen=True)
class Failure:
    """Why a stage did not finish: a sentence, the remote traceback, the log, and whether a retry may help.

    All texts are redacted.
    """

    message: str
    traceback: str = ""
    log: str = ""
    host: str = ""
    transient: bool = False
    fatal: bool = False
    """Whether every other trial would fail as well, for example because the store is full: the sweep stops."""
    repeats: bool = False
    """Whether the stage fails in the same way every time on the same processor with the same releases."""

    def __post_init__(self) -> None:
        """Redact the texts: an error may quote secrets from its arguments."""
        for name in ("message", "traceback", "log", "host"):
            object.__setattr__(self, name, shown(getattr(self, name)))


@dataclass(frozen=True)
class StageEvent:
    """Event of a stage at `time` (Unix seconds); executors yield events and trackers record them.

    A `finished` event carries the record; `failed` and `killed` events carry the failure. If a stage fails, the
    executor also yields a `failed` event with the same cause for every stage that needs it.
    """

    kind: EventKind
    key: str
    time: float
    record: StageRecord | None = None
    failure: Failure | None = None
    attempt: int = 1
    reached: Reached = NOWHERE
    """Place of the checkpoint from which a `retried` stage continues."""


@dataclass(frozen=True)
class KnownAmount:
    """Sum over the stages with a known value, and the number of stages without one."""

    known: Margin = 0.0
    unknown: Count = 0


@dataclass(frozen=True)
class Forecast:
    """Estimate made at the start of a run from the stages finished by then. Plain data, saved with the sweep."""

    made: Seconds
    """Time of the estimate, in Unix seconds."""
    stages: Count
    """Number of stages left to run."""
    work: KnownAmount
    """Seconds of all stages, one after the other."""
    wall: KnownAmount
    """Seconds to the end of the run on `slots`."""
    slots: Count | None
    """Number of stages that run at once; None if unknown, and then `wall` is unknown as well."""
    steps: KnownAmount
    """Optimizer steps of all stages."""
    bytes: KnownAmount
    """Growth of the store in bytes."""
    shared: Margin = 0.0
    """Seconds saved by sharing stages, compared with every trial running alone."""
    done: Margin = 0.0
    """Seconds that the finished stages took."""
    basis: str = ""
    """Sentence with the source of the estimate, or the reason why there is none."""
    ended: Seconds | None = None
    """End of the run in Unix seconds; None if the run is not over, or was killed."""


@dataclass(frozen=True)
class Look:
    """One look of a search: the networks that it asked for, the figures that it saw, and its conclusion."""

    title: str
    asked: tuple[Sha256, ...]
    """Stages whose networks were compared."""
    seen: Mapping[str, Number | None] = field(default_factory=dict)
    """Stage key -> primary metric on validation; None for a network without a finite figure. Empty until all are
    finished."""
    concluded: str = ""
    confirms: bool = False
    """Whether the look tested a claim."""


@dataclass(frozen=True)
class Decision:
    """State of a search: its looks so far, the stages to run next, and its answers. Plain data, saved with the sweep.

    It is saved before its stages are run. Equal records of finished stages give equal decisions.
    """

    looks: tuple[Look, ...] = ()
    run: tuple[Sha256, ...] = ()
    """Stages to run next, inputs first."""
    stopped: Mapping[str, str] = field(default_factory=dict)
    """Name of a trial that the search does not run -> the reason."""
    answers: tuple[str, ...] = ()
    networks: tuple[Sha256, ...] = ()
    """Stages of the networks in the answers."""
    ended: bool = False

    @property
    def seen(self) -> tuple[str, ...]:
        """Networks whose figures the search has seen."""
        return tuple(sorted({key for look in self.looks for key in look.seen}))


@dataclass(frozen=True)
class PastSearch:
    """Networks of a search in a saved sweep, so that no later search tests a claim with them."""

    excluded: tuple[Sha256, ...]
    """Networks that other searches had seen before this one began."""
    seen: tuple[Sha256, ...]
    """Networks that this search has seen."""


@dataclass(frozen=True)
class SweepInfo:
    """Redacted description of a sweep for views and the store."""

    name: str
    config: Mapping[str, Any]
    command: str
    environment: Mapping[str, str] = field(default_factory=dict)
    forecast: Forecast | None = None
    """Forecast of the last run with stages to run; None if there was none, or an older release saved the sweep."""

    def __post_init__(self) -> None:
        """Redact the configuration, the command and the environment."""
        object.__setattr__(self, "config", shown_tree(self.config))
        object.__setattr__(self, "command", shown(self.command))
        object.__setattr__(self, "environment", shown_tree(self.environment))


class Tracker:
    """Interface of a tracker, which shows a sweep to people. This base class records nothing."""

    complete = True
    """Whether the view holds all recorded events; valid after `finish`."""

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view: a parent for the sweep, a child for each trial, and the `finished` stages filled in."""

    def record(self, event: StageEvent) -> None:
        """Record one event. Returns at once, and raises nothing if the view cannot be reached."""

    def decided(self, decision: Decision) -> None:
        """Record the last decision of a search."""

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view: set the statuses, add the report's files (relative path -> content), and flush everything."""
