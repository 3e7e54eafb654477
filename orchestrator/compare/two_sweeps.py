"""Differences between two sweeps: of settings and origins, and of each figure, paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Literal

from orchestrator.compare.audit.rounds import TOLERANCE
from orchestrator.compare.baseline import SIZE_MARGIN, SPEED_MARGIN
from orchestrator.compare.comparison import Point
from orchestrator.compare.pairing import (
    PointName,
    Side,
    figures,
    is_primary,
    is_size,
    measured_on,
    name_of,
    pair,
)
from orchestrator.compare.panels import SettingsOfEach, as_typed
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.statistics import LEVEL, Estimate, at_level, has_spread, least_gain
from orchestrator.compare.verdicts import Places, Values, Verdict, elsewhere, judge
from orchestrator.core.metrics import Metric
from orchestrator.core.stage_kinds import KINDS

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
    stages = side.sweep.plan.stages.values()
    specs = [spec for spec in stages if KINDS[spec.kind].trains and KINDS[spec.kind].reads_test]
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


Word = Literal["better", "no worse", "worse", "open", "undecided", "the same", "no verdict"]
SPARSITY = Metric("sparsity", "% reached", "higher", margin=0.0, format=".2%")
"""Sparsity of the prunable weights; shown if the sweeps have different budgets or reached different sparsities."""


@dataclass(frozen=True)
class Difference:
    """A figure of a point in two sweeps, over the seeds that both have; `verdict.now` is the second sweep's value."""

    verdict: Verdict
    judged: bool = True
    """False for a figure that follows from the requested sparsity, if the sweeps have different budgets or results."""

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seeds that both sweeps have."""
        return self.verdict.seeds

    @property
    def word(self) -> Word:
        """Outcome in a word.

        `better` or `worse` if the interval excludes 0; else `no worse` if a loss of the margin is ruled out, and `open`
        if it is not; `undecided` if nothing can be tested. Without spread over seeds, a change is `better` or `worse`
        from the margin on, and `undecided` below it. A size has no interval: its change is compared directly.
        """
        change, metric, status = self.verdict.change, self.verdict.metric, self.verdict.status
        if change is None:
            return "undecided"
        if change.mean == 0 and not change.std:
            return "the same"
        if not self.judged:
            return "no verdict"
        if metric is None:
            return "better" if change.mean < 0 else "no worse" if status == "pass" else "worse"
        if status == "undecided":
            return "undecided"
        if not has_spread(change):
            gain = change.mean if metric.better == "higher" else -change.mean
            return "worse" if status != "pass" else "better" if gain >= self.verdict.margin > 0 else "undecided"
        if excludes_zero(change):
            return "better" if least_gain(change, metric) > 0 else "worse"
        return "no worse" if status == "pass" else "open"


@dataclass(frozen=True)
class PairedPoint:
    """A point that both sweeps have."""

    name: PointName
    """Name in the second sweep; a line or `asked_of` that differs is written as `FIRST | SECOND`."""
    same_stages: bool
    """Whether the stages have the same keys in both sweeps at all common seeds: nothing that affects bits differs."""
    only: tuple[tuple[int, ...], tuple[int, ...]]
    """Seeds that only the first sweep has, and only the second."""
    differences: tuple[Difference, ...]
    """Differences of figures; the first is of the primary metric."""
    asked_of: tuple[str, str]
    """Quantity that the requested sparsity is a fraction of in each sweep, as `Point.asked_of`."""


@dataclass(frozen=True)
class TwoSweeps:
    """Comparison of two sweeps."""

    first: Side
    second: Side
    differing: Mapping[str, tuple[str, str]]
    """Name -> value in the whole first sweep and in the whole second, for all that differs."""
    points: tuple[PairedPoint, ...]
    only: tuple[tuple[Point, ...], tuple[Point, ...]]
    """Points that only the first sweep has, and only the second."""

    @property
    def tested(self) -> tuple[Estimate, ...]:
        """Differences of primary metrics that have an interval with spread."""
        changes = (point.differences[0].verdict.change for point in self.points)
        return tuple(change for change in changes if change is not None and has_spread(change))

    @property
    def level_together(self) -> float:
        """Level of each interval at which all intervals hold together with probability LEVEL or more (Bonferroni)."""
        return 1 - (1 - LEVEL) / max(1, len(self.tested))

    @property
    def beyond_zero(self) -> tuple[int, int]:
        """Number of intervals that exclude 0: at LEVEL, and at the level at which all hold together."""
        wider = (at_level(change, self.level_together) for change in self.tested)
        return sum(map(excludes_zero, self.tested)), sum(map(excludes_zero, wider))


def compare_two(first: Side, second: Side) -> TwoSweeps:
    """Return the differences of the second sweep from the first.

    Raises:
        OrchestratorError: as `pair`
    """
    pairing = pair(first, second)
    sides = (first, second)
    found = [figures(side.comparison, side.sweep.plan, side.sweep.records) for side in sides]
    places = [measured_on(side.sweep.plan, side.sweep.records) for side in sides]
    reached = [{row.stage: row.sparsity for row in side.comparison.rows} for side in sides]
    points = [
        _with_sparsity(
            _paired(one, other, found[0][name_of(one)], found[1][name_of(other)], (places[0], places[1], first.name)),
            one.by_seed(reached[0]),
            other.by_seed(reached[1]),
        )
        for one, other in pairing.pairs
        if set(one.seeds) & set(other.seeds)
    ]
    differing = {**pairing.differing, **differences_beyond_settings(first, second)}
    return TwoSweeps(first, second, differing, tuple(points), pairing.only)


def excludes_zero(change: Estimate) -> bool:
    """Whether an interval excludes 0."""
    return change.low is not None and change.high is not None and change.low * change.high > 0


def _paired(
    one: Point, other: Point, before: Mapping[str, Values], now: Mapping[str, Values], where: tuple[Places, Places, str]
) -> PairedPoint:
    seeds = [seed for seed in one.seeds if seed in other.seeds]
    name = name_of(other)._replace(
        line=other.line if one.line == other.line else f"{one.line} | {other.line}",
        asked_of=other.asked_of if one.asked_of == other.asked_of else f"{one.asked_of} | {other.asked_of}",
    )
    margin = min(one.metric.margin, other.metric.margin)
    differences = []
    for figure in (figure for figure in before if figure in now):
        both = [seed for seed in seeds if seed in before[figure] and seed in now[figure]]
        was, is_ = ({seed: values[figure][seed] for seed in both} for values in (before, now))
        if not was or (figure == "parameters/remaining" and was == is_):
            continue
        metric = replace(other.metric, margin=margin) if is_primary(figure, other.metric) else None
        may = margin if metric is not None else SIZE_MARGIN if is_size(figure) else SPEED_MARGIN
        verdict = judge(name, figure, metric, was, is_, may, elsewhere(figure, where[1], where[0], where[2]))
        judged = one.asked_of == other.asked_of or not is_size(figure)
        differences.append(Difference(verdict, judged))
    return PairedPoint(
        name,
        all(one.stage_of[seed] == other.stage_of[seed] for seed in seeds),
        (
            tuple(seed for seed in one.seeds if seed not in other.seeds),
            tuple(seed for seed in other.seeds if seed not in one.seeds),
        ),
        tuple(differences),
        (one.asked_of, other.asked_of),
    )


def _with_sparsity(point: PairedPoint, before: Values, now: Values) -> PairedPoint:
    """Add the reached sparsities to a point if its budgets differ from weights or the reached sparsities differ."""
    first, *others = point.differences
    was, is_ = (fmean(values[seed] for seed in first.seeds) for values in (before, now))
    if point.asked_of == (WEIGHTS, WEIGHTS) and abs(is_ - was) <= TOLERANCE:
        return point
    change = Estimate(len(first.seeds), is_ - was)
    if point.asked_of == (WEIGHTS, WEIGHTS):  # sizes follow from the sparsities that were reached
        others = [replace(each, judged=each.judged and not is_size(each.verdict.figure)) for each in others]
    verdict = Verdict(point.name, "sparsity", "undecided", "", SPARSITY, was, is_, change, seeds=first.seeds)
    return replace(point, differences=(first, Difference(verdict, judged=False), *others))
