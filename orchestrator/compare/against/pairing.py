"""Which points of two sweeps belong together: those whose settings, requested sparsity and seed are the same. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.panels import DENSE_SETTINGS, POINT_SETTINGS
from orchestrator.compare.trial_settings import as_typed, settings_of_each
from orchestrator.core.errors import OrchestratorError
from orchestrator.store.saved_sweep import SavedSweep

Settings = Mapping[str, str]
"""Setting -> its value as one would type it."""
Identity = tuple[Any, ...]


@dataclass(frozen=True)
class Side:
    """One of two sweeps that are held against each other."""

    sweep: SavedSweep
    comparison: Comparison

    @property
    def name(self) -> str:
        """What the sweep is called."""
        return self.sweep.info.name

    @property
    def points(self) -> tuple[Point, ...]:
        """What can be paired: the dense networks, and the operating points."""
        return (*self.comparison.dense, *self.comparison.operating_points)

    @cached_property
    def settings(self) -> Mapping[str, Settings]:
        """Trial -> its settings, but those that move it along its line, and the seed."""
        trials = self.sweep.plan.trials
        each = settings_of_each([trial.config for trial in trials])
        moving = ("seed", *POINT_SETTINGS)
        return {
            trial.name: {name: as_typed(value) for name, value in settings.items() if name not in moving}
            for trial, settings in zip(trials, each, strict=True)
        }


@dataclass(frozen=True)
class Pairing:
    """What of two sweeps belongs together, and what stands on one side only."""

    pairs: tuple[tuple[Point, Point], ...]
    """A point of the first sweep, and that of the second."""
    only: tuple[tuple[Point, ...], tuple[Point, ...]]
    unlike: Mapping[str, tuple[str, str]]
    """Setting -> its value in all of the first sweep and in all of the second; nothing is paired by it."""


def pair(first: Side, second: Side) -> Pairing:
    """Return which points of two sweeps belong together.

    A setting that has one value in all of a sweep and another one in all of the other is what is compared. In all other
    settings, in the names of model and data set and in the sparsity asked for, the points of a pair are equal.

    Raises:
        OrchestratorError: nothing belongs together, or what does is compared by another metric
    """
    unlike = _unlike(first, second)
    ours, theirs = (dict(_identified(side, unlike.keys())) for side in (first, second))
    found = Pairing(
        pairs=tuple((point, theirs[key]) for key, point in ours.items() if key in theirs),
        only=(
            tuple(point for key, point in ours.items() if key not in theirs),
            tuple(point for key, point in theirs.items() if key not in ours),
        ),
        unlike=unlike,
    )
    if not found.pairs:
        raise OrchestratorError(
            f"{first.name} and {second.name} have nothing in common that could be paired: the first has "
            f"{_lines(first.points)}, the second {_lines(second.points)}."
        )
    for one, other in found.pairs:
        if (one.metric.name, one.metric.better) != (other.metric.name, other.metric.better):
            raise OrchestratorError(
                f"{first.name} is compared by {one.metric.title}, {second.name} by {other.metric.title}: differences "
                "have no meaning; give both the same `task`."
            )
    if not any(set(one.seeds) & set(other.seeds) for one, other in found.pairs):
        raise OrchestratorError(
            f"{first.name} and {second.name} have no seed in common at any point, and differences are paired by seed; "
            "run one with the seeds of the other."
        )
    return found


def _unlike(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Return the settings that have one value in each sweep, and not the same."""
    ours, theirs = (_values(side) for side in (first, second))
    found = {}
    for name in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(name, {""}), theirs.get(name, {""})
        if len(one) == len(other) == 1 and one != other:
            found[name] = (one.pop(), other.pop())
    return found


def _values(side: Side) -> dict[str, set[str]]:
    """Return the values of each setting in a sweep; empty where a trial has none."""
    each = list(side.settings.values())
    return {name: {settings.get(name, "") for settings in each} for name in dict.fromkeys(chain.from_iterable(each))}


def _identified(side: Side, left_out: Collection[str]) -> Iterator[tuple[Identity, Point]]:
    """Yield each point with what it is paired by; of several at one level of a line each has its number."""
    trial_of: dict[tuple[str, str], str] = {}
    dense_of = {trial.dense: trial.name for trial in side.sweep.plan.trials}
    for row in side.comparison.rows:
        trial_of.setdefault((row.line, row.stage), row.trial)
    lines: dict[tuple[Any, ...], dict[str, int]] = {}
    seen: Counter[Identity] = Counter()
    for point in side.points:
        stage, pruned = point.stages[0], point.round > 0
        settings = side.settings[trial_of[point.line, stage] if pruned else dense_of[stage]]
        told = tuple(
            sorted(
                (name, value)
                for name, value in settings.items()
                if name not in left_out and (pruned or name.startswith(DENSE_SETTINGS))
            )
        )
        line = (point.model, point.data, pruned, told)
        of_line = lines.setdefault(line, {})  # lines that differ in code alone are paired in their order
        place = of_line.setdefault(point.line, len(of_line))
        level = (*line, place, point.asked_sparsity)
        seen[level] += 1
        yield (*level, seen[level]), point


def _lines(points: Sequence[Point]) -> str:
    return ", ".join(dict.fromkeys(f"{p.line} of {p.model} on {p.data}" for p in points)) or "no finished trial"
