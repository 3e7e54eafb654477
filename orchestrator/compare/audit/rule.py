"""Rules of the audit: title, check, and what a check reads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.core.stage_kinds import KINDS
from orchestrator.planning.number_formats import first_few, percent

RuleVerdict = Literal["pass", "fail", "n/a"]
RuleAnswer = tuple[RuleVerdict, str]

LEAST_SEEDS = 3
NOTHING_FINISHED = "nothing has finished"
_EXAMPLES = 3


@dataclass(frozen=True)
class Finding:
    """One line of the checklist."""

    rule: str
    verdict: RuleVerdict
    reason: str
    of_many: bool = False
    """Whether only a sweep of several trials can pass."""


@dataclass(frozen=True)
class Audited:
    """Sweep that the rules check."""

    plan: Plan
    records: Mapping[str, StageRecord]
    comparison: Comparison

    @cached_property
    def finished(self) -> Mapping[str, StageRecord]:
        """Stage key -> record of each finished stage of the plan."""
        return {key: self.records[key] for key in self.plan.stages if key in self.records}

    @cached_property
    def trained(self) -> Mapping[str, StageRecord]:
        """Finished stages that train a network to the end of the stage's training."""
        rows = {key: KINDS[each.kind] for key, each in self.finished.items()}
        return {key: each for key, each in self.finished.items() if rows[key].trains and not rows[key].part}

    def name(self, key: str) -> str:
        """Name of a round: its first trial and its number."""
        indices = self.plan.trials_of.get(key, ())
        trial = self.plan.trials[indices[0]].name if indices else key[:12]
        return f"{trial}, round {self.plan.stages[key].round}"


@dataclass(frozen=True)
class AuditRule:
    """Rule of the audit."""

    title: str
    check: Callable[[Audited], RuleAnswer]
    searches_only: bool = False
    """Whether only a sweep with a search is checked."""
    of_many: bool = False
    """Whether only a sweep of several trials can pass."""


def held(subjects: Sized, faults: Iterable[str], reason: str, none: str = "nothing was pruned") -> RuleAnswer:
    """Return a rule's answer: its faults, or the reason why it passes; n/a with `none` if there are no `subjects`."""
    if not subjects:
        return "n/a", none
    return ("fail", listed) if (listed := some(faults)) else ("pass", reason)


def enough_seeds(points: Sequence[Point], none: str) -> RuleAnswer:
    """Check that each point has `LEAST_SEEDS` seeds."""
    counts = {id(point): len(set(point.seeds)) for point in points}
    few = [f"{at(point)} has {counts[id(point)]}" for point in points if counts[id(point)] < LEAST_SEEDS]
    return held(points, few, f"every point has {min(counts.values(), default=0)} or more", none)


def at(point: Point) -> str:
    """Name a point: its line and its sparsity."""
    return f"{point.line} at {percent(point.sparsity)}" if point.round else point.line


def some(texts: Iterable[str]) -> str:
    """Join the first few texts, and the number of the others."""
    return first_few([*texts], _EXAMPLES)
