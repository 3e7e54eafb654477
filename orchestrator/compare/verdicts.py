"""Verdicts: whether a figure, and a sweep, is as good as before, from values by seed before and now."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from orchestrator.compare.baseline import FALSE_ALARMS, Baseline, BaselinePoint, false_alarms, margin_for
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.pairing import (
    PointName,
    figures,
    is_latency,
    is_primary,
    is_size,
    is_speedup,
    measured_on,
    name_of,
    panel_name,
    primary_figure,
)
from orchestrator.compare.panels import positions
from orchestrator.compare.statistics import Estimate, estimate, has_spread, least_gain, paired_difference, ratio
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric, margin_fault
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.number_formats import first_few, percent, significant

Status = Literal["pass", "fail", "undecided"]
Values = Mapping[int, float]
"""Seed -> value."""
Places = Mapping[str, tuple[str, ...]]
"""Deployment format -> hardware on which its latency was measured."""
SPEEDUP = Metric("speedup", "%", "higher", margin=0.0, format=".1%")
LATENCY = Metric("latency", "%", "lower", margin=0.0, format=".1%")
"""Metrics of relative changes of speed-ups and latencies, by which they are written and judged."""


@dataclass(frozen=True)
class Verdict:
    """Outcome of one limit."""

    point: PointName | None
    """Name of the point; None for a failed trial."""
    figure: str
    """Name of the figure in a record; for a failed trial the trial's name."""
    status: Status
    reason: str
    """Reason why it does not pass; empty if it passes."""
    metric: Metric | None = None
    """Metric that writes the values; for a speed-up or a latency it writes the change. None for a size, for a figure
    that cannot be judged, and for a failed trial."""
    baseline: float | None = None
    """Mean over the seeds that both have; over the baseline's seeds if they have none in common."""
    now: float | None = None
    """Mean over the seeds that both have; None if they have none in common."""
    change: Estimate | None = None
    """Difference `now` - `baseline`, paired by seed. For a speed-up or a latency: ratio - 1. For a size: the largest
    relative growth over seeds. None if they cannot be compared."""
    margin: float = 0.0
    seeds: tuple[int, ...] = ()
    """Seeds of the baseline."""


def judge(
    name: PointName,
    figure: str,
    metric: Metric | None,
    before: Values,
    now: Values,
    margin: float,
    other_hardware: str = "",
) -> Verdict:
    """Return the verdict on a figure of a point.

    Args:
        name: name of the point
        figure: name of the figure
        metric: the primary metric if the figure is its value, else None
        before: baseline value by seed
        now: value by seed, to compare with `before`
        margin: by how much values may be worse, as in a baseline
        other_hardware: how the hardware differs from the baseline's; empty if it does not, or does not matter
    """
    if is_size(figure):
        return _size(name, figure, before, now, margin)
    change: Estimate | None = None
    status: Status = "undecided"
    reason = _missing(before, now) or other_hardware or "this figure cannot be judged"
    if is_speedup(figure) or is_latency(figure):
        metric = SPEEDUP if is_speedup(figure) else LATENCY
        pairs = [] if other_hardware else [(now[seed], before[seed]) for seed in before if seed in now]
        change = _relative([math.log(is_ / was) for is_, was in pairs if min(is_, was) > 0])
    elif metric is not None:
        change = paired_difference(now, before)
    if metric is not None and not _missing(before, now) and not other_hardware:
        status, reason = not_worse(change, metric, margin)
    return Verdict(name, figure, status, reason, metric, *_means(before, now), change, margin, tuple(before))


def elsewhere(figure: str, now: Places, before: Places, whose: str) -> str:
    """Return how the hardware of a figure differs from the earlier one; empty if it does not differ or matter.

    Args:
        figure: name of the figure
        now: deployment format -> hardware, as `measured_on` returns it
        before: the same for the earlier figures
        whose: owner of the earlier figures, for the message
    """
    if not (is_speedup(figure) or is_latency(figure)):
        return ""
    form = figure.split("/")[1]
    here, there = now.get(form, ()), before.get(form, ())
    if here == there and len(here) < 2:  # with several kinds, seeds could be paired across hardware
        return ""
    return f"measured on {'; '.join(here)}, but for {whose} on {'; '.join(there) or 'hardware that it does not name'}"


def _relative(log_ratios: Sequence[float]) -> Estimate | None:
    """Return the geometric mean ratio minus 1, with its interval."""
    found = ratio(log_ratios)
    if found is None or found.low is None or found.high is None:
        return None if found is None else Estimate(found.n, found.mean - 1)
    return Estimate(found.n, found.mean - 1, found.std, found.low - 1, found.high - 1)


def not_worse(change: Estimate | None, metric: Metric, margin: float) -> tuple[Status, str]:
    """Return whether a loss of `margin` is ruled out, and the reason if it is not."""
    if change is None:
        return "fail", "a value is not finite"
    if change.n == 1:
        return "undecided", "one seed has no interval; run more"
    mean = metric.gain(change.mean, 0.0)
    if not has_spread(change):  # the same change at every seed, for example if nothing has changed
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
        status, reason = "fail", f"it has grown by {percent(largest.mean, 1)}"
    return Verdict(name, figure, status, reason, None, *_means(before, now), largest, margin, tuple(before))


def _means(before: Values, now: Values) -> tuple[float | None, float | None]:
    both = [seed for seed in before if seed in now]
    was = estimate([before[seed] for seed in both or before])
    is_ = estimate([now[seed] for seed in both])
    return None if was is None else was.mean, None if is_ is None else is_.mean


def _missing(before: Values, now: Values) -> str:
    seeds = [str(seed) for seed in before if seed not in now]
    if not seeds:
        return ""
    return "the sweep does not have it" if not now else f"seed {', '.join(seeds)} is missing"


LISTED = 20
"""Maximum number of a sweep's lines named in a message."""


def verdicts(
    baseline: Baseline, comparison: Comparison, plan: Plan, records: Mapping[str, StageRecord]
) -> tuple[Verdict, ...]:
    """Return a verdict for each figure of each baseline point, and one for each failed trial of the sweep.

    A metric passes if a loss of its margin is ruled out: the one-sided 97.5% limit of the loss, paired by seed with
    the baseline, lies below the margin. A speed-up passes by the same test of its ratio to the baseline, measured on
    the same hardware. A size passes if it has grown by at most the margin at every seed. All limits of a line that the
    sweep does not have fail.

    Raises:
        OrchestratorError: the sweep has no point of the baseline, or compares a point by another metric
    """
    points = {name_of(point): point for point in comparison.shown}
    held = baseline.named_as(points)
    if not held.keys() & points.keys() and not comparison.failures:
        there = ", ".join(dict.fromkeys(f"{name.line} of {name.panel}" for name in points)) or "none"
        raise OrchestratorError(
            f"the sweep has none of the points of the baseline, which was written from {baseline.sweep!r}; the sweep "
            f"has {there}: run the baseline's command, or write a baseline of this sweep with --write-baseline."
        )
    found, here = figures(comparison, plan, records), measured_on(plan, records)
    gone, metrics = _lines_gone(held, points, plan), comparison.metrics
    judged = []
    for name, each in held.items():
        _check_metric(each, points.get(name))
        known = (points[name].metric,) if name in points else metrics
        for figure, margin in {**baseline.margins, **each.margins}.items():
            if figure in each.values:
                metric = _metric_of(figure, margin, known)
                before = dict(zip(each.seeds, each.values[figure], strict=True))
                other = elsewhere(figure, here, baseline.measured_on, "the baseline")
                verdict = judge(name, figure, metric, before, found.get(name, {}).get(figure, {}), margin, other)
                judged.append(replace(verdict, status="fail", reason=gone[name]) if name in gone else verdict)
    return (*judged, *(Verdict(None, trial, "fail", reason) for trial, reason in comparison.failures.items()))


def passes(found: Sequence[Verdict], allow_undecided: bool) -> bool:
    """Whether the gate passes."""
    return not any(each.status == "fail" or (each.status == "undecided" and not allow_undecided) for each in found)


def alarms(comparison: Comparison, baseline: Baseline) -> Iterator[str]:
    """Yield a sentence about points whose margin an equally good run would miss too often, one about single seeds."""
    single: list[str] = []
    missed: list[tuple[float, str]] = []
    points = comparison.shown
    of_points = f"{len(points)} points"
    margins = {point.name: {**baseline.margins, **point.margins} for point in baseline.points}
    for point in points:
        test, name, metric = point.test, name_of(point), point.metric
        margin = margins[name].get(primary_figure(point))
        if margin is None or test is None:
            continue
        where = f"{name.line} of {name.panel} at a sparsity of {percent(name.sparsity)}"
        if test.std is None:
            single.append(where)
        elif (chance := false_alarms(test.n, test.std, margin)) > FALSE_ALARMS:
            wider = margin_for(test.n, test.std)
            other = "" if margin_fault(metric, wider) else f", or `margins` of {significant(wider, 3)} at this point"
            spread = f"{test.n} seeds with a standard deviation of {significant(test.std, 3)}"
            missed.append((chance, f"{where}, in {percent(chance, 0)} of them: {spread}; pass more seeds{other}"))
    if single:
        yield f"{len(single)} of {of_points} have one seed, so every later run will be undecided there"
    if missed:
        yield (
            f"{len(missed)} of {of_points} would miss the margin in more than "
            f"{percent(FALSE_ALARMS, 0)} of equally good runs that share no random draw; the worst is "
            f"{max(missed)[1]}"
        )


def counted(found: Sequence[Verdict]) -> str:
    """Count verdicts by status: `5 limits: 4 pass, 1 fail, 0 undecided`."""
    of = Counter(each.status for each in found)
    return f"{len(found)} limits: {of['pass']} pass, {of['fail']} fail, {of['undecided']} undecided"


def _check_metric(held: BaselinePoint, point: Point | None) -> None:
    """Raise OrchestratorError if the sweep and the baseline compare a point by different metrics."""
    if point is not None and primary_figure(point) not in held.values:
        raise OrchestratorError(
            f"{held.line} of {held.name.panel} is compared by {primary_figure(point)}, but the baseline has "
            f"{', '.join(held.values)}; write a new baseline with --write-baseline."
        )


def _metric_of(figure: str, margin: float, metrics: Collection[Metric]) -> Metric | None:
    """Return the primary metric of a figure, None for other figures; raise OrchestratorError for an invalid margin."""
    metric = next((each for each in metrics if is_primary(figure, each)), None)
    if metric is not None and (fault := margin_fault(metric, margin)):
        raise OrchestratorError(f"the margin of `{figure}` (={margin}) {fault}")
    return metric


def _lines_gone(held: Collection[PointName], points: Collection[PointName], plan: Plan) -> dict[PointName, str]:
    """Return name of each baseline point whose line the sweep lacks -> reason, with the lines that the sweep has."""
    absent = [name for name in held if name not in points]
    planned = _planned_lines(plan) if absent else {}
    asked = {(name.panel, name.line): name.asked_of for name in points}
    found = {}
    for name in absent:
        line, now = f"line {name.line!r} of {name.panel}", asked.get((name.panel, name.line), "")
        if name.line not in planned.get(name.panel, ()):
            found[name] = f"the sweep has no {line}; it has {_listed(planned)}"
        elif now and name.asked_of and now != name.asked_of:
            found[name] = f"the sparsity of {line} is a fraction of {now}, but in the baseline of {name.asked_of}"
    return found


def _planned_lines(plan: Plan) -> dict[str, list[str]]:
    """Return panel -> labels of its dense networks and lines, finished or not."""
    found: dict[str, dict[str, None]] = {}
    for position in positions(plan):
        found.setdefault(panel_name(*position.panel), {}).update({position.dense_label: None, position.line: None})
    return {panel: [*lines] for panel, lines in found.items()}


def _listed(lines: Mapping[str, Sequence[str]]) -> str:
    return first_few([f"{line} of {panel}" for panel, each in lines.items() for line in each], LISTED)
