"""Whether a sweep is as good as its baseline: a verdict for every figure that is held. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.compare.against.baseline import (
    FALSE_ALARMS,
    Baseline,
    BaselinePoint,
    PointName,
    false_alarms,
    figures,
    is_size,
    is_speedup,
    margin_for,
    measured_on,
    name_of,
    primary_figure,
)
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.statistics import Estimate, estimate, has_spread, least_gain, paired_difference, ratio
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric, margin_fault
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

Status = Literal["pass", "fail", "undecided"]
Values = Mapping[int, float]
"""Seed -> value."""
SPEEDUP = Metric("speedup", "%", "higher", margin=0.0, format=".1%")
"""How a change of a speed-up is written and judged: as a fraction of what it was."""


@dataclass(frozen=True)
class Verdict:
    """What came of one limit."""

    point: PointName | None
    """None of a trial that failed."""
    figure: str
    """As in a record; of a trial that failed its name."""
    status: Status
    reason: str
    """Why it does not pass; empty where it does."""
    metric: Metric | None = None
    """How the values, or of a speed-up their change, are written; None: of a size, or of what the sweep lacks."""
    baseline: float | None = None
    """The mean over the seeds that both have, as `now`."""
    now: float | None = None
    change: Estimate | None = None
    """`now` less `baseline`, paired by seed; as a fraction of a speed-up their ratio less 1, of a size the largest
    growth of a seed."""
    margin: float = 0.0


def verdicts(
    baseline: Baseline, comparison: Comparison, plan: Plan, records: Mapping[str, StageRecord]
) -> tuple[Verdict, ...]:
    """Return a verdict for each figure of each point of the baseline, and one for each trial of the sweep that failed.

    A metric passes where a loss of its margin is ruled out: its one-sided 97.5% limit, paired by seed with
    the baseline, lies within. So does a speed-up, by its ratio to what it was, measured on the same hardware. A size
    passes where no seed's has grown by more than the margin.

    Raises:
        OrchestratorError: the sweep has no point of the baseline, or another metric at one
    """
    points = {name_of(point): point for point in (*comparison.dense, *comparison.operating_points)}
    held = {point.name: point for point in baseline.points}
    if not held.keys() & points.keys() and not comparison.failures:
        there = ", ".join(dict.fromkeys(f"{name.line} of {name.panel}" for name in points)) or "none"
        raise OrchestratorError(
            f"the sweep has none of the points of the baseline, which is of {baseline.sweep!r}; it has {there}: run "
            "the baseline's command, or write a baseline of this sweep with --write-baseline."
        )
    found, here = figures(comparison, plan, records), measured_on(plan, records)
    judged = [
        _verdict(
            each,
            figure,
            margin,
            points.get(name),
            found.get(name, {}).get(figure, {}),
            _elsewhere(figure, here, baseline),
        )
        for name, each in held.items()
        for figure, margin in {**baseline.margins, **each.margins}.items()
        if figure in each.values
    ]
    return (*judged, *(Verdict(None, trial, "fail", reason) for trial, reason in comparison.failures.items()))


def passes(found: Sequence[Verdict], allow_undecided: bool) -> bool:
    """Say whether the gate is open."""
    return not any(each.status == "fail" or (each.status == "undecided" and not allow_undecided) for each in found)


def alarms(comparison: Comparison, baseline: Baseline) -> Iterator[str]:
    """Yield what there is to say of each point whose margin another run as good would miss too often, by its seeds."""
    margins = {point.name: {**baseline.margins, **point.margins} for point in baseline.points}
    for point in (*comparison.dense, *comparison.operating_points):
        test, name, metric = point.test, name_of(point), point.metric
        margin = margins[name].get(primary_figure(point))
        if margin is None or test is None:
            continue
        where = f"{name.line} of {name.panel} at a sparsity of {name.sparsity:.4g}"
        if test.std is None:
            yield f"{where} has one seed: every later run is undecided"
        elif (chance := false_alarms(test.n, test.std, margin)) > FALSE_ALARMS:
            wider = margin_for(test.n, test.std)
            other = "" if margin_fault(metric, wider) else f", or `margins` of {wider:.3g} at this point,"
            yield (
                f"{where}: {test.n} seeds with a standard deviation of {metric.said(test.std)} would miss its margin "
                f"of {metric.said(margin)} in {chance:.0%} of equally good runs that share no draw; more "
                f"seeds{other} make that {FALSE_ALARMS:.0%}"
            )


def counted(found: Sequence[Verdict]) -> str:
    """Say how many limits passed."""
    of = Counter(each.status for each in found)
    return f"{len(found)} limits: {of['pass']} pass, {of['fail']} fail, {of['undecided']} undecided"


def _verdict(
    held: BaselinePoint, figure: str, margin: float, point: Point | None, now: Values, other_hardware: str
) -> Verdict:
    """Return the verdict on a figure of a point.

    Args:
        point: of the sweep, None where it has none of that name
        other_hardware: how that on which latency was measured differs, empty where it does not
    """
    if point is not None and primary_figure(point) not in held.values:
        raise OrchestratorError(
            f"{held.line} of {held.name.panel} is compared by {primary_figure(point)}, the baseline has "
            f"{', '.join(held.values)}; write it anew with --write-baseline."
        )
    before = dict(zip(held.seeds, held.values[figure], strict=True))
    if is_size(figure):
        return _size(held.name, figure, before, now, margin)
    metric: Metric | None = None
    change: Estimate | None = None
    status: Status = "undecided"
    reason = _missing(before, now) or "it is nothing that a gate can judge"
    if is_speedup(figure):
        pairs = [(now[seed], before[seed]) for seed in before if seed in now]
        metric, change = SPEEDUP, _relative([math.log(is_ / was) for is_, was in pairs if min(is_, was) > 0])
    elif point is not None and figure == primary_figure(point):
        metric, change = point.metric, paired_difference(now, before)
        if fault := margin_fault(metric, margin):
            raise OrchestratorError(f"the margin of `{figure}` (={margin}) {fault}")
    if metric is not None and not _missing(before, now):
        status, reason = not_worse(change, metric, margin)
        if metric is SPEEDUP and other_hardware:
            status, reason = "undecided", other_hardware
    return Verdict(held.name, figure, status, reason, metric, *_means(before, now), change, margin)


def _elsewhere(figure: str, here: Mapping[str, tuple[str, ...]], baseline: Baseline) -> str:
    """Say how the hardware on which a speed-up was measured differs from the baseline's; empty where it does not."""
    if not is_speedup(figure):
        return ""
    name = figure.split("/")[1]
    now, before = here.get(name, ()), baseline.measured_on.get(name, ())
    if now == before and len(now) < 2:  # else seeds may be paired across them
        return ""
    return (
        f"measured on {'; '.join(now)}, and for the baseline on {'; '.join(before) or 'hardware that it does not name'}"
    )


def _relative(log_ratios: Sequence[float]) -> Estimate | None:
    """Return the mean ratio less 1, with its interval."""
    found = ratio(log_ratios)
    if found is None or found.low is None or found.high is None:
        return None if found is None else Estimate(found.n, found.mean - 1)
    return Estimate(found.n, found.mean - 1, found.std, found.low - 1, found.high - 1)


def not_worse(change: Estimate | None, metric: Metric, margin: float) -> tuple[Status, str]:
    """Say whether a loss of `margin` is ruled out, and where it is not, why."""
    if change is None:
        return "fail", "a value is not finite"
    if change.n == 1:
        return "undecided", "one seed has no interval; run more"
    mean = metric.gain(change.mean, 0.0)
    if not has_spread(change):  # the same at every seed, as where nothing has changed
        if mean >= 0:
            return "pass", ""
        if mean <= -margin:
            return "fail", f"it is worse by {metric.said(-mean)} at every seed"
        return "undecided", f"it is worse by {metric.said(-mean)} at every seed, which leaves no spread to test with"
    least = least_gain(change, metric)
    if least > -margin:
        return "pass", ""
    if mean <= -margin:
        return "fail", f"it is worse by {metric.said(-mean)}"
    return "fail", f"a loss of up to {metric.said(-least)} is not ruled out; more seeds help"


def _size(name: PointName, figure: str, before: Values, now: Values, margin: float) -> Verdict:
    growth = [now[seed] / max(1.0, before[seed]) - 1 for seed in before if seed in now]
    largest = None if not growth else Estimate(len(growth), max(growth))
    missing = _missing(before, now)
    status: Status = "undecided" if missing else "pass"
    reason = missing
    if largest is not None and largest.mean > margin + 1e-9:
        status, reason = "fail", f"it has grown by {largest.mean:.1%}"
    return Verdict(name, figure, status, reason, None, *_means(before, now), largest, margin)


def _means(before: Values, now: Values) -> tuple[float | None, float | None]:
    both = [seed for seed in before if seed in now]
    means = (estimate([values[seed] for seed in both]) for values in (before, now))
    was, is_ = (None if each is None else each.mean for each in means)
    return was, is_


def _missing(before: Values, now: Values) -> str:
    seeds = [str(seed) for seed in before if seed not in now]
    if not seeds:
        return ""
    return "the sweep does not have it" if not now else f"seed {', '.join(seeds)} is missing"
