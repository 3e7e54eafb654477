"""A verdict: whether a figure is as good as it was, from its values by seed then and now. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from orchestrator.compare.against.paired_figures import PointName, is_latency, is_size, is_speedup
from orchestrator.compare.statistics import Estimate, estimate, has_spread, least_gain, paired_difference, ratio
from orchestrator.core.metrics import Metric

Status = Literal["pass", "fail", "undecided"]
Values = Mapping[int, float]
"""Seed -> value."""
Places = Mapping[str, tuple[str, ...]]
"""Format of a deployment -> on what its latency was measured."""
SPEEDUP = Metric("speedup", "%", "higher", margin=0.0, format=".1%")
LATENCY = Metric("latency", "%", "lower", margin=0.0, format=".1%")
"""How changes of speed-ups and latencies are written and judged: as fractions of what they were."""


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
    """How the values are written, of a speed-up or a latency their change; None: of a size, or of what is lacking."""
    baseline: float | None = None
    """Mean over the seeds that both have, as `now`; over its own seeds if they have none in common."""
    now: float | None = None
    change: Estimate | None = None
    """`now` less `baseline`, paired by seed; as a fraction of a speed-up or a latency their ratio less 1, of a size the
    largest growth of a seed; None where they cannot be compared."""
    margin: float = 0.0
    seeds: tuple[int, ...] = ()
    """Seeds that the sweep is held to."""


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
        metric: the primary one where the figure is its value; None for all others
        before: the values that `now` is held to
        margin: by how much they may be worse, as in a baseline
        other_hardware: how that on which it was measured differs, empty where it does not or plays no part
    """
    if is_size(figure):
        return _size(name, figure, before, now, margin)
    change: Estimate | None = None
    status: Status = "undecided"
    reason = _missing(before, now) or other_hardware or "it is nothing that can be judged"
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
    """Say how the hardware on which a figure was measured differs from that of before; empty where it does not.

    Args:
        now: as `measured_on` returns it, as `before`
        whose: the figures of before are
    """
    if not (is_speedup(figure) or is_latency(figure)):
        return ""
    form = figure.split("/")[1]
    here, there = now.get(form, ()), before.get(form, ())
    if here == there and len(here) < 2:  # else seeds may be paired across them
        return ""
    return f"measured on {'; '.join(here)}, and for {whose} on {'; '.join(there) or 'hardware that it does not name'}"


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
