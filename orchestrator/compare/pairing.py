"""Pairing of two sweeps: their figures by seed, and the points of equal settings and equal requested sparsity. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import by_network, hardware_of, measured_figures
from orchestrator.compare.panels import DENSE_SETTINGS, POINT_SETTINGS, SettingsOfEach, as_typed
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.store.saved_sweep import SavedSweep

Settings = Mapping[str, str]
"""Setting -> value as typed in an override."""
Identity = tuple[Any, ...]
READ_BY_SOME = ("score", "unit", "scope", "finetune")
"""Groups that some stages read and others do not: a class that prunes has no score, a training no fine-tuning."""


@dataclass(frozen=True)
class Side:
    """One of two sweeps to compare."""

    sweep: SavedSweep
    comparison: Comparison

    @property
    def name(self) -> str:
        """Name of the sweep."""
        return self.sweep.info.name

    @property
    def points(self) -> tuple[Point, ...]:
        """Points that can be paired: dense and operating points."""
        return self.comparison.shown

    @cached_property
    def settings(self) -> Mapping[str, Settings]:
        """Trial name -> its settings, without the seed and the settings that move the trial along its line.

        Settings of a group that none of the trial's stages reads are left out, such as `score` beside a class.
        """
        trials, stages = self.sweep.plan.trials, self.sweep.plan.stages
        each = SettingsOfEach(trial.config for trial in trials)
        moving = ("seed", *POINT_SETTINGS)
        found = {}
        for trial, settings in zip(trials, each, strict=True):
            read = {name for key in trial.stages for name in stages[key].fields}
            unread = tuple(f"{group}." for group in READ_BY_SOME if group not in read)
            found[trial.name] = {
                name: as_typed(value)
                for name, value in settings.items()
                if name not in moving and not name.startswith(unread)
            }
        return found


@dataclass(frozen=True)
class Pairing:
    """Pairs of points of two sweeps, and the points without a partner."""

    pairs: tuple[tuple[Point, Point], ...]
    """Point of the first sweep, and its partner in the second."""
    only: tuple[tuple[Point, ...], tuple[Point, ...]]
    """Points that only the first sweep has, and only the second."""
    differing: Mapping[str, tuple[str, str]]
    """Setting -> its single value in the first sweep and in the second; pairing ignores these settings."""


def pair(first: Side, second: Side) -> Pairing:
    """Pair the points of two sweeps.

    A setting with one value throughout the first sweep and another throughout the second is what the sweeps compare.
    The points of a pair are equal in all other settings, in model, data set and requested sparsity.

    Raises:
        OrchestratorError: no points can be paired, no pair shares a seed, or a pair has different metrics
    """
    differing = _differing(first, second)
    ours, theirs = (dict(_identified(side, differing.keys())) for side in (first, second))
    found = Pairing(
        pairs=tuple((point, theirs[key]) for key, point in ours.items() if key in theirs),
        only=(
            tuple(point for key, point in ours.items() if key not in theirs),
            tuple(point for key, point in theirs.items() if key not in ours),
        ),
        differing=differing,
    )
    if not found.pairs:
        raise OrchestratorError(
            f"{first.name} and {second.name} have no points that can be paired: the first has "
            f"{_lines(first.points)}, the second {_lines(second.points)}."
        )
    for one, other in found.pairs:
        if (one.metric.name, one.metric.better) != (other.metric.name, other.metric.better):
            raise OrchestratorError(
                f"{first.name} is compared by {one.metric.title}, {second.name} by {other.metric.title}: different "
                "metrics have no difference; give both sweeps the same `task`."
            )
    if not any(set(one.seeds) & set(other.seeds) for one, other in found.pairs):
        raise OrchestratorError(
            f"{first.name} and {second.name} have no seed in common at any point, but differences are paired by seed; "
            "run one sweep with the seeds of the other."
        )
    return found


def _differing(first: Side, second: Side) -> dict[str, tuple[str, str]]:
    """Return the settings that have one value in each sweep, but not the same one."""
    ours, theirs = (_values(side) for side in (first, second))
    found = {}
    for name in dict.fromkeys((*ours, *theirs)):
        one, other = ours.get(name, {""}), theirs.get(name, {""})
        if len(one) == len(other) == 1 and one != other:
            found[name] = (one.pop(), other.pop())
    return found


def _values(side: Side) -> dict[str, set[str]]:
    """Return setting -> its values in a sweep; "" for a trial without the setting."""
    each = list(side.settings.values())
    return {name: {settings.get(name, "") for settings in each} for name in dict.fromkeys(chain.from_iterable(each))}


def _identified(side: Side, left_out: Collection[str]) -> Iterator[tuple[Identity, Point]]:
    """Yield (identity, point); pairs have equal identities. Points at one level of a line are numbered."""
    trial_of: dict[tuple[str, str], str] = {}
    dense_of = {trial.dense: trial.name for trial in side.sweep.plan.trials}
    for row in side.comparison.rows:
        trial_of.setdefault((row.line, row.stage), row.trial)
    lines: dict[tuple[Any, ...], dict[str, int]] = {}
    seen: Counter[Identity] = Counter()
    for point in side.points:
        stage, pruned = point.stages[0], point.round > 0
        settings = side.settings[trial_of[point.line, stage] if pruned else dense_of[stage]]
        fixed = tuple(
            sorted(
                (name, value)
                for name, value in settings.items()
                if name not in left_out and (pruned or name.startswith(DENSE_SETTINGS))
            )
        )
        line = (point.model, point.data, pruned, fixed)
        of_line = lines.setdefault(line, {})  # lines that differ only in code are paired in order
        place = of_line.setdefault(point.line, len(of_line))
        level = (*line, place, point.asked_sparsity)
        seen[level] += 1
        yield (*level, seen[level]), point


def _lines(points: Sequence[Point]) -> str:
    return ", ".join(dict.fromkeys(f"{p.line} of {p.model} on {p.data}" for p in points)) or "no finished trial"


class PointName(NamedTuple):
    """Name of a point, the same in every sweep that has the point."""

    model: str
    data: str
    line: str
    sparsity: float
    """Requested sparsity, as `Point.asked_sparsity`."""
    asked_of: str
    """Quantity that the sparsity is a fraction of, as `Point.asked_of`; empty in a baseline that does not record it."""
    round: int

    @property
    def panel(self) -> str:
        """Name of the panel: model and data set."""
        return panel_name(self.model, self.data)


def panel_name(model: str, data: str) -> str:
    """Return the name of a panel: mlp on digits."""
    return f"{model} on {data}"


def is_size(figure: str) -> bool:
    """Whether a figure is a size: counted without noise, so that every seed can be checked; lower is better."""
    return figure == "parameters/remaining" or (figure.startswith("deploy/") and figure.endswith("/bytes"))


def is_speedup(figure: str) -> bool:
    """Whether a figure is a measured speed-up over the dense network; higher is better, on one kind of machine."""
    return figure.startswith("deploy/") and figure.endswith("/speedup")


def is_latency(figure: str) -> bool:
    """Whether a figure is a latency: lower is better; it is not relative to dense, so it drifts with the machine."""
    return figure.startswith("deploy/") and figure.endswith("/latency_ms")


def figures(
    comparison: Comparison, plan: Plan, records: Mapping[str, StageRecord]
) -> dict[PointName, dict[str, dict[int, float]]]:
    """Return figure -> seed -> value for each dense and operating point."""
    rows, measured = {row.stage: row for row in comparison.rows}, by_network(plan, records)
    found: dict[PointName, dict[str, dict[int, float]]] = {}
    for point in comparison.shown:
        of_point = found.setdefault(name_of(point), {})
        for row in (rows[stage] for stage in point.stages):
            own = {primary_figure(point): row.test, "parameters/remaining": float(row.remaining_parameters)}
            for each in (own, *map(measured_figures, measured.get(row.stage, ()))):
                for figure, value in each.items():
                    of_point.setdefault(figure, {})[row.seed] = value
    return found


def name_of(point: Point) -> PointName:
    """Return the name of a point."""
    return PointName(point.model, point.data, point.line, point.asked_sparsity, point.asked_of, point.round)


def primary_figure(point: Point) -> str:
    """Return the name of the figure that points are compared by: the primary metric on test."""
    return f"test/{point.metric.name}"


def is_primary(figure: str, metric: Metric) -> bool:
    """Whether a figure is the primary metric on test, of a network or of its deployed form."""
    primary = f"test/{metric.name}"
    return figure == primary or (figure.startswith("deploy/") and figure.endswith(f"/{primary}"))


def hardware(records: Iterable[StageRecord]) -> tuple[str, ...]:
    """Return the processors on which a sweep ran."""
    return tuple(sorted({record.environment.get("processor", "unknown") for record in records}))


def measured_on(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, tuple[str, ...]]:
    """Return deployment format -> hardware on which latency was measured: processor, threads and runtime."""
    found: dict[str, set[str]] = {}
    for record in chain.from_iterable(by_network(plan, records).values()):
        found.setdefault(record.spec["fields"]["format"], set()).add(hardware_of(record))
    return {name: tuple(sorted(places)) for name, places in sorted(found.items())}
