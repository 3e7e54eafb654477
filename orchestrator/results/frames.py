"""The results of a sweep as pandas DataFrames, whose columns are those of the report's trials.csv and summary.csv."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import by_network, deployed
from orchestrator.compare.panels import Position, positions
from orchestrator.compare.trial_rows import last_rows, reasons, rows_of_each, statuses
from orchestrator.compare.trial_settings import as_typed, settings_of_each, varying
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.views.report.plain_files import measured, points, row_columns

if TYPE_CHECKING:
    from pandas import DataFrame

Records = Mapping[str, StageRecord]
Columns = dict[str, list[Any]]

STEP_COLUMNS = ("kind", "round", "step", "total_step", "epoch", "time")
"""Of a point of a curve: `step` counts from where its stage begins, `total_step` from where the trial does."""


def by_point(plan: Plan, comparison: Comparison) -> DataFrame:
    """Return a line for each operating point, those of the dense networks first: the columns of summary.csv.

    After the network, the data and the line stand the settings that vary between trials, where all of a point agree.
    """
    found = points(comparison)
    names = list(dict.fromkeys(name for point in found for name in point))
    figures: Columns = {name: [point.get(name) for point in found] for name in names}
    first: Columns = {name: figures.pop(name) for name in ("model", "data", "line") if name in figures}
    return _frame(first, _of_points(plan, comparison), figures)


def by_trial(plan: Plan, records: Records, failures: Mapping[str, str]) -> DataFrame:
    """Return a line for each trial with the columns of trials.csv after its last round, empty if it has not ended.

    `status` and `failure` say what became of it, `dense` is the primary metric on test of its own dense network, and
    `difference` that of the trial less it. What was measured of it deployed is called as in summary.csv.

    Args:
        failures: stage key -> why it failed
    """
    known, status, why = positions(plan), statuses(plan, records, failures), reasons(plan, records, failures)
    last = last_rows(plan, records, known)
    dense = [records.get(trial.dense) for trial in plan.trials]
    figures: Columns = {
        "trial": [trial.name for trial in plan.trials],
        "status": [status[trial.name] for trial in plan.trials],
        "failure": [why.get(trial.name) for trial in plan.trials],
        "dense": [None if record is None else record.figure("test") for record in dense],
    }
    for name, values in row_columns([row for row in last if row is not None]).items():
        if name not in ("trial", "final"):
            left = iter(values)
            figures[name] = [None if row is None else next(left) for row in last]
    figures |= _told_by_configuration(known)
    pairs = zip(figures["test"], figures["dense"], strict=True)
    figures["difference"] = [None if test is None or dense is None else test - dense for test, dense in pairs]
    return _frame({"trial": figures.pop("trial")}, parameters(plan), figures | _deployed(plan, records))


def by_round(plan: Plan, records: Records) -> DataFrame:
    """Return a line for each trial and finished round, 0 being the dense network: the columns of trials.csv."""
    chains = rows_of_each(plan, records, positions(plan))
    figures = row_columns([row for chain in chains for row in chain])
    settings = {name: _repeated(values, map(len, chains)) for name, values in parameters(plan).items()}
    return _frame({"trial": figures.pop("trial")}, settings, figures)


def by_step(trials: Sequence[TrialSpec], records: Records, settings: Columns) -> DataFrame:
    """Return a line for each point of the trials' training curves: `STEP_COLUMNS`, and each metric by split and name.

    Args:
        settings: name -> value by trial
    """
    chains = [list(_finished(trial, records)) for trial in trials]
    keys = dict.fromkeys(record.key for chain in chains for record in chain)
    metrics = sorted({name for key in keys for point in records[key].curve for name in point.metrics})
    curves = {key: _curve(records[key], metrics) for key in keys}
    columns: Columns = {name: [] for name in (*STEP_COLUMNS, *metrics)}
    lengths = []
    for chain in chains:
        before, offset = len(columns["step"]), 0
        for record in chain:
            curve = curves[record.key]
            for name, values in curve.items():
                columns[name] += values
            columns["total_step"] += [offset + step for step in curve["step"]]
            offset += record.steps
        lengths.append(len(columns["step"]) - before)

    names = _repeated([trial.name for trial in trials], lengths)
    return _frame({"trial": names}, {name: _repeated(values, lengths) for name, values in settings.items()}, columns)


def parameters(plan: Plan) -> Columns:
    """Return the settings that vary between trials, each with its value by trial; a list is as one types it."""
    settings = settings_of_each([trial.config for trial in plan.trials])
    found = {name: [each.get(name) for each in settings] for name in varying(settings)}
    return {
        name: [as_typed(value) if isinstance(value, list | tuple | dict) else value for value in values]
        for name, values in found.items()
    }


def _told_by_configuration(known: Sequence[Position]) -> Columns:
    """Return by trial what a row says of it that is known before it has ended."""
    return {
        "model": [each.panel[0] for each in known],
        "data": [each.panel[1] for each in known],
        **{name: [getattr(each, name) for each in known] for name in ("line", "method", "schedule", "seed")},
    }


def _of_points(plan: Plan, comparison: Comparison) -> Columns:
    """Return the settings that vary, by operating point; None where its trials differ."""
    place = {trial.name: index for index, trial in enumerate(plan.trials)}
    trials_of: dict[tuple[str, str], list[int]] = {}  # the dense network of a trial is on no line
    for row in comparison.rows:
        trials_of.setdefault((row.stage, row.line if row.round else ""), []).append(place[row.trial])

    def trials(point: Point) -> list[int]:
        line = point.line if point.round else ""
        return [index for stage in point.stages for index in trials_of[stage, line]]

    groups = [trials(point) for point in (*comparison.dense, *comparison.operating_points)]
    return {
        name: [_agreed([values[index] for index in group]) for group in groups]
        for name, values in parameters(plan).items()
        if name != "seed"
    }


def _agreed(values: Sequence[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else None


def _deployed(plan: Plan, records: Records) -> Columns:
    """Return what was measured of each trial's last network, by column; nothing where nothing was."""
    measurements = by_network(plan, records)
    found = [
        {name: value for each in deployed(trial.stages[-1:], measurements) for name, value in measured(each).items()}
        for trial in plan.trials
    ]
    return {name: [each.get(name) for each in found] for name in dict.fromkeys(name for each in found for name in each)}


def _finished(trial: TrialSpec, records: Records) -> Iterator[StageRecord]:
    for key in trial.stages:
        if key not in records:
            return
        yield records[key]


def _curve(record: StageRecord, metrics: Sequence[str]) -> Columns:
    """Return the columns of one stage, but for those that depend on the trial."""
    points, of = record.curve, [point.metrics for point in record.curve]
    return {
        "kind": [record.kind] * len(points),
        "round": [record.round] * len(points),
        "step": [point.step for point in points],
        "epoch": [point.epoch for point in points],
        "time": [point.time for point in points],
        **{name: [each.get(name) for each in of] for name in metrics},
    }


def _repeated(values: Iterable[Any], times: Iterable[int]) -> list[Any]:
    return [value for value, count in zip(values, times, strict=True) for _ in range(count)]


def _frame(first: Columns, settings: Columns, figures: Columns) -> DataFrame:
    """Return the columns side by side, texts as they may be shown; a setting that figures hold is left to these."""
    from pandas import DataFrame, array

    own = {name: values for name, values in settings.items() if name not in figures and name not in first}
    columns = {shown(name): _shown(values) for name, values in (first | own | figures).items()}
    # pandas would make floats of whole numbers of which some are missing
    return DataFrame({n: array(each, dtype="Int64") if _gaps(each) else each for n, each in columns.items()})


def _gaps(values: list[Any]) -> bool:
    known = [value for value in values if value is not None]
    return {*map(type, known)} == {int} and len(known) < len(values) and -(2**63) <= min(known) <= max(known) < 2**63


def _shown(values: list[Any]) -> list[Any]:
    """Return the values with texts as they may be shown: what others had a hand in could steer a terminal."""
    if str not in set(map(type, values)):
        return values
    changed = {text: safe for text in {each for each in values if type(each) is str} if (safe := shown(text)) != text}
    return [changed.get(each, each) if type(each) is str else each for each in values] if changed else values
