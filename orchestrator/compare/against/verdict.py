"""Verdict: whether a figure is as good as before, from its values by seed before and now. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.compare.against.paired_figures import PointName, is_latency, is_size, is_speedup
from orchestrator.compare.statistics import Estimate, estimate, has_spread, least_gain, paired_difference, ratio
from orchestrator.core.metrics import Metric
from orchestrator.planning.number_formats import percent

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
