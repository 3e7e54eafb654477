"""Verdicts on whether a sweep is as good as its baseline, one for every checked figure. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from orchestrator.compare.against.baseline import FALSE_ALARMS, Baseline, BaselinePoint, false_alarms, margin_for
from orchestrator.compare.against.paired_figures import (
    PointName,
    figures,
    is_primary,
    measured_on,
    name_of,
    panel_name,
    primary_figure,
)
from orchestrator.compare.against.verdict import Verdict, elsewhere, judge
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.panels import positions
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import Metric, margin_fault
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.number_formats import first_few, percent, significant

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
    points = {name_of(point): point for point in (*comparison.dense, *comparison.operating_points)}
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
    points = (*comparison.dense, *comparison.operating_points)
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
