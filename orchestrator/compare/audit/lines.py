"""Rules of the audit that look at lines and their points."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from orchestrator.compare.audit.answers import Answer, held, some
from orchestrator.compare.comparison import Comparison, LineKey, Point
from orchestrator.compare.statistics import has_spread, least_gain
from orchestrator.config.parts.choices import decides_itself
from orchestrator.core.specs import Plan

LEAST_POINTS, LEAST_SEEDS, LEAST_PANELS = 5, 3, 3
EQUAL_COST = 0.05
"""Fraction of the training by which what is compared may differ in it: what most scores read is less."""


def operating_points(comparison: Comparison) -> Answer:
    counts = {line: len({round(p.sparsity, 4) for p in points}) for (_, _, line), points in comparison.lines.items()}
    few = [f"{line} has {count}" for line, count in counts.items() if count < LEAST_POINTS]
    return held(counts, few, f"every line has {min(counts.values(), default=0)} or more")


def both_measures(points: Sequence[Point], deploys: bool) -> Answer:
    """Hold points to both; where trials are deployed, the ends of lines also to a speed-up that was measured."""
    lacking = [_at(point) for point in points if not (point.compression >= 1 and point.macs_left is not None)]
    if deploys:
        lacking += [f"{_at(point)} was not measured" for point in points if point.final and not point.deployed]
        return held(points, lacking, "both are given for every point, and measured where a trial ends")
    return held(
        points, lacking, "both are given for every point; the speed-up is theoretical, from multiply-accumulates"
    )


def random_control(plan: Plan, comparison: Comparison) -> Answer:
    """Look for a line that removes at random, by its method or by its score."""
    return _control(plan, comparison, ("random_unstructured", "random_structured"), "random")


def magnitude_baseline(plan: Plan, comparison: Comparison) -> Answer:
    """Look for a line that removes the smallest weights, by its method or by its score."""
    return _control(plan, comparison, ("ln_structured",), "magnitude")


def _control(plan: Plan, comparison: Comparison, methods: Sequence[str], score: str) -> Answer:
    """Judge by what chooses, and not by what it is called; shuffled or inverted masks are no control."""
    choosing = {
        trial.name
        for trial in plan.trials
        if (
            trial.config["method"].get("kind") in methods
            if decides_itself(trial.config["method"])
            else trial.config.get("score", {"kind": "magnitude"}).get("kind") == score
        )
        and trial.config.get("restart", {}).get("control", "none") not in ("invert", "shuffle")
    }
    pruned = [row for row in comparison.rows if row.round]
    found = "; ".join(dict.fromkeys(row.line for row in pruned if row.trial in choosing))
    among = "; ".join(dict.fromkeys(row.line for row in pruned))
    return held(pruned, [] if found else [f"none among {among}"], found)


def seeds(points: Sequence[Point]) -> Answer:
    few = [f"{_at(point)} has {len(set(point.seeds))}" for point in points if len(set(point.seeds)) < LEAST_SEEDS]
    fewest = min((len(set(point.seeds)) for point in points), default=0)
    return held(points, few, f"every point has {fewest} or more", "nothing has finished")


def panels(comparison: Comparison) -> Answer:
    count = len(comparison.panels)
    if not count:
        return "n/a", "nothing has finished"
    listed = ", ".join(f"{model} on {data}" for model, data in comparison.panels)
    return ("pass" if count >= LEAST_PANELS else "fail"), f"{count}: {listed}"


def dense(comparison: Comparison) -> Answer:
    found = [(point, point.test.mean) for point in comparison.dense if point.test]
    without = sorted(set(comparison.panels) - {(point.model, point.data) for point, _ in found})
    listed = some(f"{point.model} on {point.data}: {point.metric.said(mean)}" for point, mean in found)
    return held(comparison.points, (f"none for {model} on {data}" for model, data in without), listed)


def paired(comparison: Comparison) -> Answer:
    points = comparison.operating_points
    odd = []
    for panel in comparison.panels:
        here = [point for point in points if (point.model, point.data) == panel]
        usual = Counter(point.seeds for point in here).most_common(1)
        odd += [f"{_at(point)} has seeds {list(point.seeds)}" for point in here if point.seeds != usual[0][0]]
    return held(points, odd, "each pruned network is compared with the dense network of its own seed")


def equally_trained(comparison: Comparison) -> Answer:
    """Hold the points at each sparsity to the least of their costs; of each line its largest excess is told."""
    levels = Counter(point.level for point in comparison.operating_points)
    compared = [point for point in comparison.operating_points if levels[point.level] > 1]
    excess: dict[LineKey, tuple[float, str]] = {}
    for point, other in comparison.costlier:
        times = point.total_cost / max(other.total_cost, 1.0)
        if times > max(1 + EQUAL_COST, excess.get(point.line_key, (0.0, ""))[0]):
            excess[point.line_key] = times, f"{_at(point)} cost {times:.3g} times what {other.line} did"
    reason = f"at each sparsity, costs (steps from initialisation, and scoring) differ by {EQUAL_COST:.0%} at most"
    return held(compared, (said for _, said in excess.values()), reason, "no two lines have a point at one sparsity")


def gained(comparison: Comparison) -> Answer:
    """Hold what is shown to be better than dense, and trained on from it, to what is not pruned and trained longest."""
    longest: dict[tuple[str, str], float] = {}
    for point in (*comparison.dense, *(point for point in comparison.points if not point.sparsity)):
        panel = point.model, point.data
        longest[panel] = max(longest.get(panel, 0.0), point.total_cost)
    anew = {row.stage for row in comparison.rows if row.chosen.restart.startswith(("weights=step", "weights=reinit"))}
    pairs = ((point, point.difference) for point in comparison.operating_points if point.sparsity)
    gained = [p for p, d in pairs if d and has_spread(d) and least_gain(d, p.metric) > 0 and not anew & {*p.stages}]
    costs = ((point, point.total_cost / max(longest[point.model, point.data], 1.0)) for point in gained)
    faults = (
        f"{_at(p)} trained {cost:.3g} times as long; add +control=longer" for p, cost in costs if cost > 1 + EQUAL_COST
    )
    return held(gained, faults, "in as many steps", "nothing is shown to gain by training on from dense")


def matching(comparison: Comparison) -> Answer:
    points = comparison.operating_points
    untested = (f"{_at(point)} has no spread to test with" for point in points if point.matching == "untested")
    losses = " or ".join(metric.loss for metric in comparison.metrics)
    reason = f"{losses} is called a match in at most 2.5% of lines, paired by seed"
    return held(points, untested, reason)


def finished(comparison: Comparison) -> Answer:
    missing = some(name for name, status in comparison.trials.items() if status != "finished")
    return ("fail", missing) if missing else ("pass", f"all {len(comparison.trials)}")


def _at(point: Point) -> str:
    return f"{point.line} at {point.sparsity:.1%}" if point.round else point.line
