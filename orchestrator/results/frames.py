"""Results of a sweep as pandas DataFrames, with the columns of the report's trials.csv and summary.csv."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import by_network, deployed
from orchestrator.compare.panels import Position, SettingsOfEach, as_typed, positions, varying
from orchestrator.compare.sensitivity import SENSITIVITY_COLUMNS, sensitivity_curves, sensitivity_rows
from orchestrator.compare.trial_rows import last_rows, reasons, rows_of_each, statuses
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown
from orchestrator.core.specs import Plan, TrialSpec
from orchestrator.views.report.plain_files import measured, points, row_columns

if TYPE_CHECKING:
    from pandas import DataFrame

Records = Mapping[str, StageRecord]
Columns = dict[str, list[Any]]

STEP_COLUMNS = ("kind", "round", "step", "total_step", "epoch", "time")
"""Columns of a training curve: `step` counts from the start of the stage, `total_step` from the start of the trial."""
MASK_UPDATE_COLUMNS = (
    *("round", "step", "kept", "dropped", "grown", "first_overlap", "last_overlap", "explored", "sparsity"),
)
"""Columns of a change of masks: `step` counts from the start of the round's training."""

LAYER_COLUMNS = ("round", "layer", "block", "entries", "density", "error", "rows")
"""Columns of a tensor: `error` is the squared change of its layer's outputs / their square, from `rows` inputs."""
GENERATION_COLUMNS = ("round", "sparsity", "prompt", "text")
"""Columns of a continuation: `text` follows `prompt`."""


def by_point(plan: Plan, comparison: Comparison) -> DataFrame:
    """Return one row for each operating point, dense networks first, with the columns of summary.csv.

    The settings that vary between trials follow the columns `model`, `data` and `line`; a setting is None at points
    whose trials differ in it.
    """
    found = points(comparison)
    names = list(dict.fromkeys(name for point in found for name in point))
    figures: Columns = {name: [point.get(name) for point in found] for name in names}
    first: Columns = {name: figures.pop(name) for name in ("model", "data", "line") if name in figures}
    return _frame(first, _of_points(plan, comparison), figures)


def by_trial(
    plan: Plan, records: Records, failures: Mapping[str, str], stopped: Mapping[str, str] | None = None
) -> DataFrame:
    """Return one row for each trial, with the columns of trials.csv after its last round; None if it has not ended.

    `status` and `failure` are the outcome of the trial, `dense` is the primary metric of its own dense network on
    test, and `difference` is `test` - `dense`. Deployment measurements have the column names of summary.csv.

    Args:
        plan: plan of the sweep
        records: stage key -> record
        failures: stage key -> why it failed
        stopped: trial -> why a search did not run it; None without a search
    """
    known, why = positions(plan), reasons(plan, records, failures)
    status = statuses(plan, records, failures, stopped or ())
    last = last_rows(plan, records, known)
    dense = [records.get(trial.dense) for trial in plan.trials]
    figures: Columns = {
        "trial": [trial.name for trial in plan.trials],
        "status": [status[trial.name] for trial in plan.trials],
        "failure": [why.get(trial.name) for trial in plan.trials],
        **({} if stopped is None else {"stopped": [stopped.get(trial.name) for trial in plan.trials]}),
        "dense": [None if record is None else record.figure("test") for record in dense],
    }
    for name, values in row_columns([row for row in last if row is not None]).items():
        if name not in ("trial", "final"):
            left = iter(values)
            figures[name] = [None if row is None else next(left) for row in last]
    figures |= _configured_columns(known)
    pairs = zip(figures["test"], figures["dense"], strict=True)
    figures["difference"] = [None if test is None or dense is None else test - dense for test, dense in pairs]
    return _frame({"trial": figures.pop("trial")}, parameters(plan), figures | _deployed(plan, records))


def by_round(plan: Plan, records: Records) -> DataFrame:
    """Return one row for each trial and finished round (0 is the dense network), with the columns of trials.csv."""
    chains = rows_of_each(plan, records, positions(plan))
    figures = row_columns([row for chain in chains for row in chain])
    settings = {name: _repeated(values, map(len, chains)) for name, values in parameters(plan).items()}
    return _frame({"trial": figures.pop("trial")}, settings, figures)


def by_step(trials: Sequence[TrialSpec], records: Records, settings: Columns) -> DataFrame:
    """Return one row for each point of the trials' training curves: `STEP_COLUMNS`, and metrics as `split/name`.

    Args:
        trials: trials whose curves to return
        records: stage key -> record
        settings: column name -> value for each trial
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


def by_mask_update(plan: Plan, records: Records) -> DataFrame:
    """Return one row for each trial, round and change of masks within its training: `MASK_UPDATE_COLUMNS`.

    `sparsity` is the fraction of the prunable weights that is masked after the change.
    """
    return _of_stages(plan, records, _mask_updates, MASK_UPDATE_COLUMNS)


def _mask_updates(record: StageRecord) -> Iterator[dict[str, Any]]:
    for each in record.typed.mask_updates:
        yield {**vars(each), "round": record.round, "sparsity": 1 - each.kept / max(1, record.prunable_parameters)}


def by_layer(plan: Plan, records: Records) -> DataFrame:
    """Return one row for each trial, round and prunable tensor: `LAYER_COLUMNS`.

    `block`, `error` and `rows` are None unless the round pruned layer by layer with calibration data.
    """
    return _of_stages(plan, records, _layers, LAYER_COLUMNS)


def by_sensitivity(plan: Plan, records: Records) -> DataFrame:
    """Return one row for each layer that was pruned alone and sparsity: `SENSITIVITY_COLUMNS`."""
    return of_rows([*sensitivity_rows(sensitivity_curves(plan, records))], SENSITIVITY_COLUMNS)


def by_generation(plan: Plan, records: Records) -> DataFrame:
    """Return one row for each trial, round (0 is the dense network) and prompt: `GENERATION_COLUMNS`."""
    return _of_stages(plan, records, _generations, GENERATION_COLUMNS)


def _generations(record: StageRecord) -> Iterator[dict[str, Any]]:
    for each in record.typed.generations:
        yield {"round": record.round, "sparsity": record.sparsity, **vars(each)}


def _layers(record: StageRecord) -> Iterator[dict[str, Any]]:
    layers = record.typed.scoring.layers
    for name, sparsity in record.tensor_sparsity.items():
        yield {
            "round": record.round,
            "layer": name,
            "entries": record.tensor_sizes[name],
            "density": 1 - sparsity,
            **{column: getattr(layers.get(name), column, None) for column in ("block", "error", "rows")},
        }


def _of_stages(
    plan: Plan, records: Records, rows_of: Callable[[StageRecord], Iterable[Mapping[str, Any]]], names: Sequence[str]
) -> DataFrame:
    """Return the rows of each trial's finished stages, with the columns `names` after the trial and its settings."""
    rows = {record.key: [*rows_of(record)] for trial in plan.trials for record in _finished(trial, records)}
    found = [[row for record in _finished(trial, records) for row in rows[record.key]] for trial in plan.trials]
    lengths = list(map(len, found))
    settings = {
        n: _repeated(v, lengths) for n, v in {**parameters(plan), **_configured_columns(positions(plan))}.items()
    }
    columns: Columns = {name: [row[name] for each in found for row in each] for name in names}
    return _frame({"trial": _repeated([trial.name for trial in plan.trials], lengths)}, settings, columns)


def of_rows(rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> DataFrame:
    """Return rows of plain values as a frame with the columns `names`."""
    return _frame({name: [row[name] for row in rows] for name in names}, {}, {})


def parameters(plan: Plan) -> Columns:
    """Return setting -> value for each trial, for settings that vary; a list is written as in an override."""
    settings = SettingsOfEach(trial.config for trial in plan.trials)
    found = {name: [each.get(name) for each in settings] for name in varying(settings)}
    return {
        name: [as_typed(value) if isinstance(value, list | tuple | dict) else value for value in values]
        for name, values in found.items()
    }


def _configured_columns(known: Sequence[Position]) -> Columns:
    """Return the columns that are known before a trial has ended, with a value for each trial."""
    return {
        "model": [each.panel[0] for each in known],
        "data": [each.panel[1] for each in known],
        **{name: [getattr(each, name) for each in known] for name in ("line", "method", "schedule", "seed")},
    }


def _of_points(plan: Plan, comparison: Comparison) -> Columns:
    """Return varying setting -> value for each operating point, None if the point's trials differ."""
    place = {trial.name: index for index, trial in enumerate(plan.trials)}
    trials_of: dict[tuple[str, str], list[int]] = {}  # a dense network is on no line: its key has an empty one
    for row in comparison.rows:
        trials_of.setdefault((row.stage, row.line if row.round else ""), []).append(place[row.trial])

    def trials(point: Point) -> list[int]:
        line = point.line if point.round else ""
        return [index for stage in point.stages for index in trials_of[stage, line]]

    groups = [trials(point) for point in comparison.shown]
    return {
        name: [_agreed([values[index] for index in group]) for group in groups]
        for name, values in parameters(plan).items()
        if name != "seed"
    }


def _agreed(values: Sequence[Any]) -> Any:
    return values[0] if values and all(value == values[0] for value in values) else None


def _deployed(plan: Plan, records: Records) -> Columns:
    """Return measurement column -> value for each trial's last network; empty if nothing was measured."""
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
    """Return the curve columns of one stage that do not depend on the trial."""
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
    """Join the columns into a frame; texts are made safe to display. A setting that is also a figure appears once."""
    from pandas import DataFrame, array

    own = {name: values for name, values in settings.items() if name not in figures and name not in first}
    columns = {shown(name): _shown(values) for name, values in (first | own | figures).items()}
    # pandas would turn integers with missing values into floats
    return DataFrame({n: array(each, dtype="Int64") if _gaps(each) else each for n, each in columns.items()})


def _gaps(values: list[Any]) -> bool:
    known = [value for value in values if value is not None]
    return {*map(type, known)} == {int} and len(known) < len(values) and -(2**63) <= min(known) <= max(known) < 2**63


def _shown(values: list[Any]) -> list[Any]:
    """Make texts safe to display: a text from elsewhere could contain terminal control codes."""
    if str not in set(map(type, values)):
        return values
    changed = {text: safe for text in {each for each in values if type(each) is str} if (safe := shown(text)) != text}
    return [changed.get(each, each) if type(each) is str else each for each in values] if changed else values
