"""Comparison of a sweep's trials: a tidy row for each trial and round, and each point over its seeds. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean as mean
from typing import Any

from orchestrator.catalogue.searches import SEARCHES
from orchestrator.compare.comparison import Comparison, Cost, Level, LineKey, Point, Search, StoppedPoint, TrialRow
from orchestrator.compare.deployment_points import by_network, deployed
from orchestrator.compare.harness_scores import harness_scores
from orchestrator.compare.panels import Position, positions
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.secondary_figures import asked_figures, further_test_sets, harmed, window_differences
from orchestrator.compare.statistics import Estimate, Match, estimate, matches, paired_difference
from orchestrator.compare.trial_rows import reasons, rows_of_each, statuses, warnings
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Decision
from orchestrator.core.metrics import margin_fault
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.core.stage_kinds import KINDS
from pruning.measure.garbage_collection import collector_paused

Sample = tuple[TrialRow, TrialRow]
"""A row, and the row of its own dense network."""
_MEANS = (
    *("sparsity", "compression", "remaining_parameters", "macs", "macs_remaining"),
    *("total_steps", "total_cost", "total_seconds", "own_steps", "own_seconds"),
)
"""Row fields averaged into a point."""
_KNOWN_MEANS = ("speedup", "active_parameters", "training_macs", "total_training_macs")
"""Row fields averaged into a point if every seed has a value."""


@collector_paused()
def compare_trials(
    plan: Plan,
    records: Mapping[str, StageRecord],
    failures: Mapping[str, str] | None = None,
    margin: float | None = None,
    search: Decision | None = None,
) -> Comparison:
    """Compare the trials of `plan` by their finished stages.

    Equal stages count once: a stage that two trials or two merged sweeps share is one sample, not two.

    Args:
        plan: plan of one sweep, or the merged plan of several
        records: stage key -> record of each finished stage
        failures: stage key -> why it failed
        margin: loss that a match may hide, in the metric's own scale; by default the margin that the trials are
            configured with, else the metric's own; if trials differ, the smallest
        search: last decision of the sweep's search; None if all trials were to be run
    """
    failures, known, margins = failures or {}, positions(plan), _margins(plan, records, margin)
    chains = rows_of_each(plan, records, known)
    rows = tuple(row for chain in chains for row in chain)
    dense, pruned = _samples(plan, known, chains)
    labels = {position.dense: position.dense_label for position in known}
    measured = by_network(plan, records)
    left_out = _left_out(plan, known, records, search)
    answers = frozenset(search.networks if search else ())
    points = [
        replace(
            _point([*samples.values()], margins, records, measured=measured),
            stopped=left_out[place],
            answer=not answers.isdisjoint(samples),
        )
        for place, samples in pruned.items()
    ]
    comparison = Comparison(
        rows=rows,
        dense=tuple(_point([*each.values()], margins, records, labels[key]) for key, each in dense.items()),
        points=_marked(sorted(points, key=_rank(rows))),
        trials=statuses(plan, records, failures, search.stopped if search else ()),
        failures=reasons(plan, records, failures),
        cost=_cost(plan, records),
        search=None if search is None else _searched(plan, known, left_out, search, records),
        warnings=warnings(plan, records),
    )
    windows = window_differences(plan, records, comparison.whole_points)
    scores = harness_scores(plan, records, comparison.whole_points)
    return replace(comparison, points=_tested(comparison), windows=windows, harness=scores)


def merge_plans(plans: Sequence[Plan]) -> Plan:
    """Merge plans into one; a trial that several sweeps have is kept once."""
    stages = {key: spec for plan in plans for key, spec in plan.stages.items()}
    trials: dict[tuple[str, tuple[str, ...]], TrialSpec] = {}
    names: Counter[str] = Counter()
    for trial in (trial for plan in plans for trial in plan.trials):
        if (trial.name, trial.stages) not in trials:
            names[trial.name] += 1
            count = names[trial.name]
            trials[trial.name, trial.stages] = trial if count == 1 else replace(trial, name=f"{trial.name} #{count}")
    return Plan(stages, tuple(trials.values()))


def _left_out(
    plan: Plan, known: Sequence[Position], records: Mapping[str, StageRecord], search: Decision | None
) -> Counter[Hashable]:
    """Count the seeds that a search did not run, for each point and round."""
    found: Counter[Hashable] = Counter()
    for trial, position in zip(plan.trials, known, strict=True):
        if search is not None and trial.name in search.stopped:
            missing = (index for index, key in enumerate(trial.stages) if index and key not in records)
            found.update((position.point, index) for index in missing)
    return found


def _searched(
    plan: Plan,
    known: Sequence[Position],
    left_out: Mapping[Hashable, int],
    search: Decision,
    records: Collection[str],
) -> Search:
    """Describe a search and the points that it did not run for all seeds."""
    planned = Counter(position.point for position in known)
    begun = {
        position.point
        for trial, position in zip(plan.trials, known, strict=True)
        if any(key in records for key in (*trial.parts, *trial.stages) if plan.stages[key].round)
    }
    points: dict[Hashable, StoppedPoint] = {}
    for trial, position in zip(plan.trials, known, strict=True):
        count = left_out.get((position.point, len(trial.stages) - 1), 0)
        if count and position.point not in points and trial.name in search.stopped:
            target = plan.stages[trial.stages[-1]].fields.get("target")
            seeds = planned[position.point]
            line = (*position.panel, position.line)
            reason = search.stopped[trial.name]
            points[position.point] = StoppedPoint(
                line, target, seeds - count, seeds, reason, begun=position.point in begun
            )
    looked = [look for look in search.looks if look.seen]
    return Search(
        answers=search.answers,
        looks=len(looked),
        tests=sum(look.confirms for look in looked),
        ended=search.ended,
        stopped=search.stopped,
        points=tuple(points.values()),
        networks=search.networks,
        against=tuple(dict.fromkeys(name for trial in plan.trials for name in _against(trial))),
    )


def _against(trial: TrialSpec) -> Sequence[str]:
    """Return the quantities of a trial's frontier; empty for another search."""
    search = trial.config.get("search") or {}
    row = SEARCHES.get(str(search.get("kind")))
    return search.get("against", ()) if row is not None and row.draws_frontier else ()


def _samples(
    plan: Plan, known: Sequence[Position], chains: Sequence[Sequence[TrialRow]]
) -> tuple[dict[str, dict[str, Sample]], dict[Hashable, dict[str, Sample]]]:
    """Group samples by stage: for each dense configuration, and for each point and round.

    Args:
        known: position of each trial
        chains: rows of each trial
    """
    dense: dict[str, dict[str, Sample]] = {}
    pruned: dict[Hashable, dict[str, Sample]] = {}
    for trial, position, chain in zip(plan.trials, known, chains, strict=True):
        reference = next((row for row in chain if row.stage == trial.dense), None)
        if reference is None:
            continue
        for row in chain:
            sample = (row, reference)
            if row is reference:
                dense.setdefault(position.dense, {}).setdefault(row.stage, sample)
            else:
                pruned.setdefault((position.point, row.round), {}).setdefault(row.stage, sample)
    return dense, pruned


def _point(
    samples: Sequence[Sample],
    margins: Mapping[str, float],
    records: Mapping[str, StageRecord],
    label: str = "",
    measured: Mapping[str, Sequence[StageRecord]] | None = None,
) -> Point:
    """Summarise samples over seeds.

    Args:
        margins: name of a primary metric -> margin to test with
        label: line label of a dense point
        measured: stage key -> measurements of its deployed network
    """
    samples = sorted(samples, key=lambda sample: sample[0].seed)
    rows = [row for row, _ in samples]
    values = {row.stage: row.test for row in rows}
    reference = {row.stage: dense.test for row, dense in samples}
    stages = {row.stage: dense.stage for row, dense in samples}
    befores = [row.val_before for row in rows if row.val_before is not None]
    reached = [row.chosen.reached for row in rows if row.chosen.reached is not None]
    means: dict[str, Any] = {name: mean([getattr(row, name) for row in rows]) for name in _MEANS}
    means |= {name: _known_mean([getattr(row, name) for row in rows]) for name in _KNOWN_MEANS}
    first, metric = rows[0], records[rows[0].stage].primary
    return Point(
        model=first.model,
        data=first.data,
        line=first.line if first.round else label,
        method=first.method if first.round else "dense",
        schedule=first.schedule if first.round else "",
        round=first.round,
        final=any(row.final for row in rows),
        requested_sparsity=first.requested_sparsity,
        seeds=tuple(row.seed for row in rows),
        stages=tuple(row.stage for row in rows),
        metric=replace(metric, margin=margins.get(metric.name, metric.margin)),
        test=estimate(list(values.values())),
        val=estimate([row.val for row in rows]),
        val_before=estimate(befores),
        difference=paired_difference(values, reference),
        dense_training_macs=_known_mean([dense.training_macs for _, dense in samples]),
        further=further_test_sets(stages, records),
        asked=asked_figures(stages, records),
        harmed=harmed(stages, records),
        deployed=deployed(stages, measured or {}),
        unit=first.chosen.unit,
        budget=first.chosen.budget or WEIGHTS,
        reached=mean(reached) if reached else None,
        considered=_known_mean([records[row.stage].considered for row in rows]),
        constant=_known_mean([records[row.stage].constant for row in rows]),
        **means,
    )


def _rank(rows: Sequence[TrialRow]) -> Callable[[Point], tuple[int, int, float, int]]:
    """Sort key: panel and line in order of first appearance, then sparsity and round."""
    panels = {panel: position for position, panel in enumerate(dict.fromkeys((row.model, row.data) for row in rows))}
    lines = {line: position for position, line in enumerate(dict.fromkeys(row.line for row in rows))}
    return lambda point: (panels[point.panel], lines[point.line], point.sparsity, point.round)


def _marked(points: Sequence[Point]) -> tuple[Point, ...]:
    """Mark the best mean at each level where several lines end, on test and on each further test set."""
    best = _best(points, lambda point: point.test)
    marked = [replace(point, best=True) if id(point) in best else point for point in points]
    for name in dict.fromkeys(each.name for point in points for each in point.further):
        best = _best(points, partial(Point.on, text=name))
        for index, (point, own) in enumerate(zip(points, marked, strict=True)):
            if id(point) in best:
                texts = (replace(each, best=each.best or each.name == name) for each in own.further)
                marked[index] = replace(own, further=tuple(texts))
    return tuple(marked)


def _best(points: Sequence[Point], figure: Callable[[Point], Estimate | None]) -> set[int]:
    """Return the identities of the points with the best mean at a level where several lines end."""
    levels: dict[Level, list[tuple[str, float, int]]] = {}
    for point in points:
        if point.final and not point.stopped and (found := figure(point)) is not None:
            gain = point.metric.gain(found.mean, 0.0)
            levels.setdefault(point.level, []).append((point.line, gain, id(point)))
    return {
        identity
        for each in levels.values()
        if len({line for line, _, _ in each}) > 1
        for _, gain, identity in each
        if gain == max(gain for _, gain, _ in each)
    }


def _tested(comparison: Comparison) -> tuple[Point, ...]:
    """Test each line's operating points in order of sparsity; other rounds are not tested.

    The tests of a line end before the first point that a search did not run for all seeds. A search that tested its
    answer itself gives the only verdict: no point is tested again.
    """
    if comparison.search is not None and comparison.search.tests and comparison.search.ended:
        return tuple(replace(point, matching="not tested") for point in comparison.points)
    verdicts: dict[int, Match] = {}
    for key, points in comparison.lines.items():
        end = _first_stopped(comparison, key)
        line = [point for point in points if point.asked_sparsity < end and not point.stopped]
        found = matches([point.difference for point in line], points[0].metric)
        verdicts |= {id(point): matching for point, matching in zip(line, found, strict=True)}
    return tuple(replace(point, matching=verdicts.get(id(point), "not tested")) for point in comparison.points)


def _first_stopped(comparison: Comparison, line: LineKey) -> float:
    """Return the smallest sparsity of a line that a search did not run for all seeds; infinity if there is none."""
    stopped = comparison.search.points if comparison.search else ()
    asked = [-math.inf if each.sparsity is None else each.sparsity for each in stopped if each.line_key == line]
    partial = [point.asked_sparsity for point in comparison.lines[line] if point.stopped]
    return min([*asked, *partial], default=math.inf)


def _margins(plan: Plan, records: Mapping[str, StageRecord], margin: float | None) -> dict[str, float]:
    """Return name of a primary metric -> margin to test with.

    The margin is `margin` if given, else the smallest among the trials with that metric: merged sweeps may differ.

    Raises:
        OrchestratorError: a margin of 1 or more for a metric that is a fraction
    """
    asked: dict[Any, set[str]] = {}
    for trial in plan.trials:
        asked.setdefault(trial.config.get("compare", {}).get("margin"), set()).update((trial.dense, *trial.stages))
    least: dict[str, float] = {}
    for each, keys in asked.items():
        for metric in (records[key].primary for key in keys if key in records):
            own = margin if margin is not None else metric.margin if each is None else float(each)
            asked_for = margin is not None or each is not None
            if asked_for and (fault := margin_fault(metric, own)):
                raise OrchestratorError(f"`{'compare.' if margin is None else ''}margin` (={own:g}) {fault}")
            least[metric.name] = min(least.get(metric.name, own), own)
    return least


def _known_mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of values; None if one is None."""
    known = [value for value in values if value is not None]
    return mean(known) if len(known) == len(values) else None


def _cost(plan: Plan, records: Mapping[str, StageRecord]) -> Cost:
    trained = [key for key, spec in plan.stages.items() if key in records and KINDS[spec.kind].trains]
    # a start's steps are the first steps of the dense training, and counted there
    steps = plan.added({key: records[key].steps if KINDS[records[key].kind].counts_steps else 0 for key in trained})
    seconds = plan.added({key: records[key].seconds for key in trained})
    uses = {key: len(plan.trials_of[key]) for key in trained}
    return Cost(
        steps=round(sum(steps.values())),
        seconds=sum(seconds.values()),
        unshared_steps=round(sum(each * uses[key] for key, each in steps.items())),
        unshared_seconds=sum(each * uses[key] for key, each in seconds.items()),
    )
