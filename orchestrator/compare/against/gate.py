"""Whether a sweep is as good as its baseline: a verdict for every figure that is held. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from orchestrator.compare.against.baseline import FALSE_ALARMS, Baseline, BaselinePoint, false_alarms, margin_for
from orchestrator.compare.against.figures import figures, is_primary, measured_on, name_of, primary_figure
from orchestrator.compare.against.verdicts import Values, Verdict, elsewhere, judge
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.metrics import margin_fault
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan


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
            elsewhere(figure, here, baseline.measured_on, "the baseline"),
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
    """Return the verdict on a figure of a point of the baseline; `point` is the sweep's, None where it has none."""
    if point is not None and primary_figure(point) not in held.values:
        raise OrchestratorError(
            f"{held.line} of {held.name.panel} is compared by {primary_figure(point)}, the baseline has "
            f"{', '.join(held.values)}; write it anew with --write-baseline."
        )
    metric = point.metric if point is not None and is_primary(figure, point) else None
    if metric is not None and (fault := margin_fault(metric, margin)):
        raise OrchestratorError(f"the margin of `{figure}` (={margin}) {fault}")
    before = dict(zip(held.seeds, held.values[figure], strict=True))
    return judge(held.name, figure, metric, before, now, margin, other_hardware)
