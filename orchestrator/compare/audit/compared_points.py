"""Rules about the compared points: how many, over which seeds, trained how long, tested how."""

from __future__ import annotations

from collections import Counter

from orchestrator.compare.audit.rule import (
    LEAST_SEEDS,
    NOTHING_FINISHED,
    Audited,
    AuditRule,
    RuleAnswer,
    at,
    enough_seeds,
    held,
    some,
)
from orchestrator.compare.comparison import LEAST_SKILL, LineKey, Point
from orchestrator.compare.statistics import has_spread, least_gain
from orchestrator.planning.number_formats import percent, ratio

LEAST_POINTS, LEAST_PANELS = 5, 3
EQUAL_COST = 0.05
"""Largest relative difference in training cost between compared points; the examples of most scores cost less."""


def _operating_points(sweep: Audited) -> RuleAnswer:
    counts = {
        line: len({round(p.sparsity, 4) for p in points}) for (_, _, line), points in sweep.comparison.lines.items()
    }
    few = [f"{line} has {count}" for line, count in counts.items() if count < LEAST_POINTS]
    return held(counts, few, f"every line has {min(counts.values(), default=0)} or more")


def _both_measures(sweep: Audited) -> RuleAnswer:
    """Check every point for both measures; in a sweep that deploys, also each line's end for a measured speed-up."""
    points, deploys = sweep.comparison.operating_points, any(trial.measured for trial in sweep.plan.trials)
    lacking = [at(point) for point in points if not (point.compression >= 1 and point.macs_left is not None)]
    if deploys:
        lacking += [f"{at(point)} was not measured" for point in points if point.final and not point.deployed]
        return held(points, lacking, "both are given for every point, and measured where a trial ends")
    return held(
        points, lacking, "both are given for every point; the speed-up is theoretical, from multiply-accumulates"
    )


def _seeds(sweep: Audited) -> RuleAnswer:
    return enough_seeds([*sweep.comparison.dense, *sweep.comparison.whole_points], NOTHING_FINISHED)


def _panels(sweep: Audited) -> RuleAnswer:
    count = len(sweep.comparison.panels)
    if not count:
        return "n/a", NOTHING_FINISHED
    listed = ", ".join(f"{model} on {data}" for model, data in sweep.comparison.panels)
    return ("pass" if count >= LEAST_PANELS else "fail"), f"{count}: {listed}"


def _dense(sweep: Audited) -> RuleAnswer:
    found = [(point, point.test.mean) for point in sweep.comparison.dense if point.test]
    without = sorted(set(sweep.comparison.panels) - {point.panel for point, _ in found})
    listed = some(f"{point.model} on {point.data}: {point.metric.said(mean)}" for point, mean in found)
    return held(sweep.comparison.points, (f"none for {model} on {data}" for model, data in without), listed)


def _learned(sweep: Audited) -> RuleAnswer:
    """Check that each dense network is better than an answer that is the same for every example."""
    known = [point for point in sweep.comparison.dense if point.skill is not None]
    faults = (unlearned_text(point) for point in sweep.comparison.unlearned)
    reason = f"each goes {percent(LEAST_SKILL, 0)} or more of the way from a constant answer to a perfect one"
    return held(known, faults, reason, "no task here records the metric of a constant answer")


def unlearned_text(point: Point) -> str:
    """Return a dense network's metric next to that of a constant answer."""
    reached, constant = (
        point.metric.said(value) for value in (point.test.mean if point.test else 0, point.constant or 0)
    )
    return f"{point.model} on {point.data}: {point.metric.title} {reached}, a constant answer {constant}"


def _paired(sweep: Audited) -> RuleAnswer:
    points = sweep.comparison.whole_points
    odd = []
    for panel in sweep.comparison.panels:
        here = [point for point in points if point.panel == panel]
        usual = Counter(point.seeds for point in here).most_common(1)
        odd += [f"{at(point)} has seeds {list(point.seeds)}" for point in here if point.seeds != usual[0][0]]
    return held(points, odd, "each pruned network is compared with the dense network of its own seed")


def _equally_trained(sweep: Audited) -> RuleAnswer:
    """Compare each point's cost with the cheapest point at its sparsity; report the largest excess of each line."""
    levels = Counter(point.level for point in sweep.comparison.operating_points)
    compared = [point for point in sweep.comparison.operating_points if levels[point.level] > 1]
    excess: dict[LineKey, tuple[float, str]] = {}
    for point, other in sweep.comparison.costlier:
        times = point.total_cost / max(other.total_cost, 1.0)
        if times > max(1 + EQUAL_COST, excess.get(point.line_key, (0.0, ""))[0]):
            excess[point.line_key] = times, f"{at(point)} cost {ratio(times)} as much as {other.line}"
    reason = (
        f"at each sparsity, costs (steps from initialisation, and scoring) differ by {percent(EQUAL_COST, 0)} at most"
    )
    return held(compared, (said for _, said in excess.values()), reason, "no two lines have a point at one sparsity")


def _gained(sweep: Audited) -> RuleAnswer:
    """Check gains over dense of points that train on from it against the longest trained unpruned network."""
    longest: dict[tuple[str, str], float] = {}
    for point in (*sweep.comparison.dense, *(point for point in sweep.comparison.points if not point.sparsity)):
        longest[point.panel] = max(longest.get(point.panel, 0.0), point.total_cost)
    restarted = {key for key, spec in sweep.plan.stages.items() if not spec.typed.restart.weights_row.keeps}
    pairs = ((point, point.difference) for point in sweep.comparison.operating_points if point.sparsity)
    gained = [
        p for p, d in pairs if d and has_spread(d) and least_gain(d, p.metric) > 0 and not restarted & {*p.stages}
    ]
    costs = ((point, point.total_cost / max(longest[point.panel], 1.0)) for point in gained)
    faults = (
        f"{at(p)} trained {ratio(cost)} as long as dense; add +control=longer"
        for p, cost in costs
        if cost > 1 + EQUAL_COST
    )
    return held(gained, faults, "dense trained as long", "no network that trained on from dense is shown to be better")


def _matching(sweep: Audited) -> RuleAnswer:
    points = sweep.comparison.operating_points
    untested = (f"{at(point)} has no spread to test with" for point in points if point.matching == "untested")
    losses = " or ".join(metric.loss for metric in sweep.comparison.metrics)
    reason = f"{losses} is called a match in at most 2.5% of lines, paired by seed"
    return held(points, untested, reason)


def _one_kind(sweep: Audited) -> RuleAnswer:
    environments = [record.environment for record in sweep.finished.values()]
    kinds = {name: sorted({each.get(name, "not recorded") for each in environments}) for name in ("processor", "torch")}
    mixed = some(f"{name}: {' and '.join(found)}" for name, found in kinds.items() if len(found) > 1)
    faults = [f"one stage may have different bits on each: {mixed}"] if mixed else []
    return held(sweep.finished, faults, ", ".join(found for kind in kinds.values() for found in kind), NOTHING_FINISHED)


def _finished(sweep: Audited) -> RuleAnswer:
    missing = some(name for name, status in sweep.comparison.trials.items() if status not in ("finished", "stopped"))
    stopped = sum(status == "stopped" for status in sweep.comparison.trials.values())
    apart = f", except {stopped} that the search stopped" if stopped else ""
    return ("fail", missing) if missing else ("pass", f"all {len(sweep.comparison.trials)}{apart}")


def _searched(sweep: Audited) -> RuleAnswer:
    """Check that a search has ended; report the number of its looks at validation figures and of its tests."""
    if (search := sweep.comparison.search) is None:
        return "n/a", "every trial was to be run"
    reason = f"{search.looks} looks at validation figures, {search.tests} of them tests; stopped trials are not tested"
    return held([search], [] if search.ended else [f"the search has not ended: {reason}"], reason)


def _without_warnings(sweep: Audited) -> RuleAnswer:
    faults = (f"{stages[0]}: {text}" for text, stages in sweep.comparison.warnings.items())
    return held(sweep.finished, faults, "no finished stage has one", NOTHING_FINISHED)


RULES = (
    AuditRule(f"{LEAST_POINTS} or more operating points on every line", _operating_points, of_many=True),
    AuditRule("compression and theoretical speed-up, both", _both_measures),
    AuditRule(f"{LEAST_SEEDS} or more seeds at every point", _seeds, of_many=True),
    AuditRule(f"{LEAST_PANELS} or more pairs of data set and network", _panels, of_many=True),
    AuditRule("the dense network's figures", _dense),
    AuditRule("the dense network has learned its task", _learned),
    AuditRule("the same seeds for dense and pruned, and for every line", _paired),
    AuditRule("compared after equal training", _equally_trained),
    AuditRule("gains over dense are gains over dense trained as long", _gained, of_many=True),
    AuditRule("matching is a test against a stated margin", _matching, of_many=True),
    AuditRule("one kind of processor, one release of torch", _one_kind),
    AuditRule("every trial finished", _finished),
    AuditRule("no stage has a warning", _without_warnings),
    AuditRule("a search says what it has seen and left out", _searched, searches_only=True),
)
