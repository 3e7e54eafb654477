"""Choice of the trial to export: by name, or by the conditions of `--best` on the points of a comparison. Pure."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.deploy.formats.format import ExportError
from orchestrator.planning.number_formats import counted, first_few, percent, significant

RELATIONS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
MOST_OFFSET = 0.1
"""Largest offset from dense of a metric that is a fraction: 10 points. Larger ones are taken for points."""
WITH_NONE = "with search=none if a search has stopped it"
"""End of the remedy for a trial that has not run."""
_NUMBER = r"\d+(?:\.\d*)?|\.\d+"
CONDITION = re.compile(
    rf"\s*(?P<split>\w+)/(?P<metric>\w+)\s*(?P<relation>>=|<=|>|<)\s*"
    rf"(?:(?P<dense>dense)\s*(?:(?P<sign>[+-])\s*(?P<offset>{_NUMBER}))?|(?P<bound>-?(?:{_NUMBER})))\s*"
)


@dataclass(frozen=True)
class Condition:
    """A condition on the mean of a validation metric, in the metric's own scale, as in margins.

    Args:
        metric: name of the metric.
        relation: a key of `RELATIONS`.
        dense: whether `bound` is added to the mean of the dense networks.
        bound: number to compare with; with `dense`, -0.005 means half a point of a fraction less than the dense
            networks.
    """

    metric: str
    relation: str
    dense: bool
    bound: float

    def __str__(self) -> str:
        return f"val/{self.metric}{self.relation}{self._of_dense(self.bound) if self.dense else f'{self.bound:g}'}"

    @staticmethod
    def _of_dense(offset: float) -> str:
        return f"dense{offset:+g}" if offset else "dense"

    def in_points(self, metric: Metric) -> str:
        """Return why the bound is taken for percentage points of a metric that is a fraction; empty if it is not."""
        if metric.scale == 1:
            return ""
        fraction = f"{self.bound / metric.scale:g}"
        if not self.dense and not 0 <= self.bound <= 1:
            return f"{metric.title} is a fraction between 0 and 1; type val/{self.metric}{self.relation}{fraction}."
        if self.dense and abs(self.bound) > MOST_OFFSET:
            meant, offset = replace(self, bound=self.bound / metric.scale), abs(self.bound)
            return (
                f"{metric.title} is a fraction, and {offset:g} is {offset * metric.scale:g} points of it; type {meant} "
                f"for {offset:g} points, or name a bound without dense."
            )
        return ""

    def margin(self, value: float, dense: float) -> float:
        """Return the distance of a mean from the bound; positive if the condition holds, negative if not."""
        bound = self.bound + (dense if self.dense else 0.0)
        return value - bound if self.relation.startswith(">") else bound - value

    def holds(self, value: float, dense: float) -> bool:
        """Return whether a mean meets the condition; >= and <= allow for rounding errors of 1e-9."""
        margin = self.margin(value, dense)
        return margin >= -1e-9 if self.relation.endswith("=") else margin > 1e-9


@dataclass(frozen=True)
class ChosenTrial:
    """A stage to export, and the trial that ends with it."""

    stage: str
    trial: TrialSpec


def conditions(text: str) -> tuple[Condition, ...]:
    """Parse conditions such as `val/loss<=dense+0.1 and val/loss<0.5`.

    Raises:
        ExportError: the text is not of this form, or names another split than validation
    """
    found = []
    for part in text.split(" and "):
        match = CONDITION.fullmatch(part)
        if match is None:
            meant = f"; did you mean 'val/{part.strip()}'?" if CONDITION.fullmatch(f"val/{part.strip()}") else "."
            raise ExportError(
                f"`--best` (={text!r}) must be conditions such as 'val/loss<=dense+0.1' or 'val/accuracy>=0.9', joined "
                f"by `and`; {part.strip()!r} is not a condition{meant}"
            )
        if match["split"] != "val":
            raise ExportError(
                f"`--best` (={text!r}) must name metrics on validation; type val/{match['metric']}. Test figures are "
                "biased for a network that was chosen by them."
            )
        bound = float(match["bound"] or f"{match['sign'] or ''}{match['offset'] or 0}")
        found.append(Condition(match["metric"], match["relation"], bool(match["dense"]), bound))
    return tuple(found)


def points_meeting(text: str, comparison: Comparison, plan: Plan, records: Mapping[str, StageRecord]) -> list[Point]:
    """Return the pruned points at the ends of trials whose means over seeds meet the conditions.

    Raises:
        ExportError: no point meets them (the message names the closest), the text is not a condition, or a metric was
            not measured
    """
    asked, points = conditions(text), [point for point in comparison.points if point.final and not point.stopped]
    if not points:
        raise ExportError(
            f"`--best` (={text!r}) has nothing to choose from: no pruned trial is finished with all its seeds; run "
            f"the sweep again, {WITH_NONE}."
        )
    _refuse_points(text, asked, points, records)
    closest: tuple[float, str] | None = None
    found = []
    for point in points:
        pairs = _figures(asked, point, plan, records)
        if all(one.holds(value, reference) for one, value, reference in pairs):
            found.append(point)
        short, figure = min(
            (one.margin(value, reference), _figure_text(one, value, reference)) for one, value, reference in pairs
        )
        if closest is None or short > closest[0]:
            closest = short, f"{point.line} at {percent(point.sparsity)} with {figure}"
    if not found and closest:
        raise ExportError(f"`--best` (={text!r}) is met by no trial: the closest is {closest[1]}; ask for less.")
    return found


def figures_text(text: str, stage: str, points: Sequence[Point], plan: Plan, records: Mapping[str, StageRecord]) -> str:
    """Return the figures by which a stage's point meets the conditions, in the scale of the conditions.

    Args:
        text: the conditions.
        stage: a stage of one of the points.
        points: the points that meet the conditions.
        plan: plan of the sweep.
        records: records of the stages.
    """
    point = next(each for each in points if stage in each.stages)
    said = "; ".join(_figure_text(*figures) for figures in _figures(conditions(text), point, plan, records))
    return f"{said} (mean over {counted(len(point.stages), 'seed')}); {len(points)} met it"


def _figures(
    asked: Sequence[Condition], point: Point, plan: Plan, records: Mapping[str, StageRecord]
) -> list[tuple[Condition, float, float]]:
    """Return each condition with its metric's mean over the point's seeds, and over their dense networks."""
    dense = [*dict.fromkeys(plan.trials[plan.trials_of[stage][0]].dense for stage in point.stages)]
    return [(one, _mean(one, point.stages, records), _mean(one, dense, records)) for one in asked]


def _refuse_points(
    text: str, asked: Sequence[Condition], points: Sequence[Point], records: Mapping[str, StageRecord]
) -> None:
    """Raise ExportError for a condition in percentage points on a metric that is a fraction."""
    for one in asked:
        if fault := one.in_points(metric_named(one.metric, records[points[0].stages[0]])):
            raise ExportError(f"`--best` (={text!r}) must be in the metric's own scale, as margins: {fault}")


def smallest_stage(points: Sequence[Point], size: Callable[[str], float], records: Mapping[str, StageRecord]) -> str:
    """Return the best-validated stage of the point with the fewest bytes; of equal points, the fastest.

    If all points were measured in one format, batch size and machine, the measured bytes and latency decide. Otherwise
    the bytes of the shrunk networks and the multiply-accumulates by the masks decide.

    Args:
        points: the points to choose from.
        size: stage -> bytes of its shrunk network; only called for several points that were not all measured.
        records: records of the stages.
    """
    best = [best_validated(point, records) for point in points]
    if len(points) == 1:
        return best[0]
    weighed = _measured(points) or [
        (size(stage), 1.0 if point.macs_left is None else point.macs_left)
        for point, stage in zip(points, best, strict=True)
    ]
    return min(zip(weighed, best, strict=True), key=operator.itemgetter(0))[1]


def _measured(points: Sequence[Point]) -> list[tuple[float, float]]:
    """Return the measured bytes and milliseconds of each point; empty if they have no measurement in common."""
    found = [
        {(each.format, each.batch_size, each.hardware): (each.bytes, each.latency_ms) for each in point.deployed}
        for point in points
    ]
    shared = next((kind for kind in found[0] if all(kind in each for each in found)), None)
    return [] if shared is None else [each[shared] for each in found]


def best_validated(point: Point, records: Mapping[str, StageRecord]) -> str:
    """Return the stage of the seed with the best primary metric on validation; of equal ones, the first."""
    metric = point.metric
    return max(point.stages, key=lambda stage: metric.gain(records[stage].figure("val"), 0.0))


def trial_named(text: str | None, plan: Plan, records: Mapping[str, StageRecord]) -> ChosenTrial:
    """Return the trial whose name is `text` or begins with it; without a text, the only trial.

    Raises:
        ExportError: no trial matches, several do, or the trial is not finished
    """
    names = [repr(trial.name) for trial in plan.trials]
    trials = [trial for trial in plan.trials if text is None or trial.name == text]
    trials = trials or [trial for trial in plan.trials if text is not None and trial.name.startswith(text)]
    if not trials:
        raise ExportError(f"`--trial` (={text!r}) is not in the sweep, which has {first_few(names, 20, ', ')}.")
    if len(trials) > 1:
        what = "`--trial` or `--best` must be given" if text is None else f"`--trial` (={text!r}) matches several"
        raise ExportError(f"{what}: the sweep has {first_few([repr(each.name) for each in trials], 20, ', ')}.")
    stage = trials[0].stages[-1]
    if stage not in records:
        raise ExportError(f"`--trial` (={trials[0].name!r}) is not finished; run the sweep again, {WITH_NONE}.")
    return ChosenTrial(stage, trials[0])


def ending_with(stage: str, plan: Plan) -> ChosenTrial:
    """Return the choice of a stage with which a trial ends."""
    return next(ChosenTrial(stage, trial) for trial in plan.trials if trial.stages[-1] == stage)


def metric_named(name: str, record: StageRecord) -> Metric:
    """Return a metric of a record by name; `loss` is one of them."""
    return {each.name: each for each in record.metrics}.get(name, Metric(name, "", "lower", margin=0.0))


def _mean(condition: Condition, stages: Sequence[str], records: Mapping[str, StageRecord]) -> float:
    """Return the mean over stages of a condition's metric on validation."""
    figure = f"val/{condition.metric}"
    for stage in stages:
        if stage in records and figure not in records[stage].after:
            known = ", ".join(sorted(name for name in records[stage].after if name.startswith("val/")))
            raise ExportError(f"`--best` asks for {figure}, which was not measured; type one of {known}.")
    held = [records[stage] for stage in stages if stage in records]
    return fmean(record.after[figure] for record in held)


def _figure_text(condition: Condition, value: float, dense: float) -> str:
    beside = f", dense {significant(dense)}" if condition.dense else ""
    return f"val/{condition.metric} {significant(value)}{beside}"
