"""Comparison as machine-readable files: CSV and JSON."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from orchestrator.compare.comparison import Comparison, Point, TrialRow
from orchestrator.compare.deployment_points import DeployedPoint
from orchestrator.compare.harness_scores import HarnessScore
from orchestrator.compare.round_columns import Chosen
from orchestrator.compare.secondary_figures import WindowDifference
from orchestrator.compare.sensitivity import SENSITIVITY_COLUMNS, SensitivityCurve, sensitivity_rows
from orchestrator.compare.statistics import Estimate
from orchestrator.core.redact import shown, shown_json

_COMPUTED = ("=", "+", "-", "@", "\t", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20")
"""First characters by which a spreadsheet takes a text for a formula, with their full-width forms."""

_OF_WINDOWS = ("model", "data", "text", "line", "reference", "sparsity", "achieved")
WINDOW_COLUMNS = (
    *(*_OF_WINDOWS, "seeds", "windows", "difference"),
    *("windows_low", "windows_high", "draws_std", "draws_low", "draws_high"),
)
"""Columns of windows.csv."""
_OF_SCORES = ("model", "data", "line", "round", "sparsity", "achieved", "task", "shots")
HARNESS_COLUMNS = (
    *(*_OF_SCORES, "metric", "better", "seeds", "score", "dense", "difference", "seeds_std"),
    *("documents", "documents_low", "documents_high"),
)
"""Columns of harness.csv."""


def rows_csv(comparison: Comparison) -> bytes:
    """Return trials.csv: one row for each trial and round."""
    columns = row_columns(comparison.rows)
    return table_csv(
        [*columns], (dict(zip(columns, line, strict=True)) for line in zip(*columns.values(), strict=True))
    )


def points_csv(comparison: Comparison) -> bytes:
    """Return summary.csv: one row for each operating point."""
    found = points(comparison)
    return table_csv(list(dict.fromkeys(name for point in found for name in point)), found)


def windows_csv(comparison: Comparison) -> bytes:
    """Return windows.csv: one row for each difference paired by window of held-out text."""
    return table_csv(WINDOW_COLUMNS, map(window_row, comparison.windows))


def harness_csv(comparison: Comparison) -> bytes:
    """Return harness.csv: one row for each point, task and metric of lm-evaluation-harness."""
    return table_csv(HARNESS_COLUMNS, map(harness_row, comparison.harness))


def harness_row(each: HarnessScore) -> dict[str, Any]:
    """Return column name -> value of a score on a task of lm-evaluation-harness."""
    found: dict[str, Any] = {name: getattr(each, name) for name in _OF_SCORES}
    found |= {"metric": each.metric.name, "better": each.metric.better, "seeds": " ".join(map(str, each.seeds))}
    found |= {"score": each.score.mean, "dense": each.dense, "difference": each.difference.mean}
    found |= {"seeds_std": each.difference.std, "documents": None if each.documents is None else each.documents.n}
    return found | parts("documents", each.documents, ("low", "high"))


def sensitivity_csv(curves: Sequence[SensitivityCurve]) -> bytes:
    """Return sensitivity.csv: one row for each layer that was pruned alone, and sparsity."""
    return table_csv(SENSITIVITY_COLUMNS, sensitivity_rows(curves))


def window_row(each: WindowDifference) -> dict[str, Any]:
    """Return column name -> value of a difference paired by window of held-out text."""
    found: dict[str, Any] = {name: getattr(each, name) for name in _OF_WINDOWS}
    found |= {"seeds": " ".join(map(str, each.seeds)), "windows": each.windows.n, "difference": each.windows.mean}
    return found | parts("windows", each.windows, ("low", "high")) | parts("draws", each.draws, ("std", "low", "high"))


def row_columns(each: Sequence[TrialRow]) -> dict[str, list[Any]]:
    """Return column name -> values of a comparison's rows; None for a missing value.

    The order: fields of `TrialRow`, fields of `Chosen`, then other metrics and test sets by name.
    """
    found = _by_field(TrialRow._fields, each)
    chosen, others = found.pop("chosen"), found.pop("others")
    names = sorted({name for other in others for name in other})
    return found | _by_field(Chosen._fields, chosen) | {name: [other.get(name) for other in others] for name in names}


def _by_field(names: Sequence[str], each: Sequence[tuple[Any, ...]]) -> dict[str, list[Any]]:
    columns = zip(*each, strict=True) if each else [()] * len(names)
    return {name: [*column] for name, column in zip(names, columns, strict=True)}


def points(comparison: Comparison) -> list[dict[str, Any]]:
    """Return column name -> value of each point, dense points first; an estimate takes several columns."""
    return [_flat(point) for point in comparison.shown]


def as_json(comparison: Comparison) -> bytes:
    """Return the comparison as JSON; a number that is not finite becomes null."""
    return (shown_json(_finite(comparison.to_json()), indent=1) + "\n").encode()


def parts(name: str, found: Estimate | None, ends: Sequence[str] = ("mean", "std", "low", "high")) -> dict[str, Any]:
    """Return the columns of an estimate, as `test_mean`; None for what is not known."""
    return {f"{name}_{end}": getattr(found, end, None) for end in ends}


def _flat(point: Point) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in vars(point).items():
        if name == "metric":
            flat[name] = point.metric.name
        elif name in ("test", "val", "val_before", "difference"):
            flat |= parts(name, value)
        elif name == "further":
            for each in point.further:
                flat |= parts(f"{each.name}_test", each.test, ("mean",))
                flat |= parts(f"{each.name}_difference", each.difference, ("mean",))
        elif name == "asked":
            for figure in point.asked:
                flat |= parts(f"{figure.split}_{figure.metric.name}", figure.test)
        elif name == "deployed":
            for one in point.deployed:
                flat |= measured(one)
        elif name == "harmed":
            flat[name] = " ".join(f"{each.label}:{each.loss:.6g}" for each in point.harmed)
        elif name != "stages" and not (name in ("stopped", "answer") and not value):
            flat[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return flat


def measured(each: DeployedPoint) -> dict[str, Any]:
    """Return the columns of a deployment; of several kinds of machine, the last one wins."""
    form, where, ends = each.format, f"{each.format}_{each.batch_size}", ("mean", "low", "high")
    found: dict[str, Any] = {f"{form}_bytes": each.bytes, f"{form}_dense_bytes": each.dense_bytes}
    if each.test is not None or each.val is not None:  # the format changes outputs
        found |= parts(f"{form}_val", each.val) | parts(f"{form}_test", each.test)
        found[f"{form}_dense_test"] = each.dense_test
    for name in ("latency_ms", "dense_ms", "memory", "dense_memory"):
        found[f"{where}_{name}"] = getattr(each, name)
    found |= parts(f"{where}_speedup", each.speedup, ends) | {f"{where}_hardware": each.hardware}
    if each.token_speedup is not None:
        found |= {f"{where}_token_ms": each.token_ms, f"{where}_dense_token_ms": each.dense_token_ms}
        found |= parts(f"{where}_token_speedup", each.token_speedup, ends)
    if each.speedup_pytorch is not None:
        found |= parts(f"{where}_speedup_pytorch", each.speedup_pytorch, ends)
        found[f"{where}_dense_runtime"] = " or ".join(each.dense_runtimes)
    if each.speedup_int8 is not None:
        found |= parts(f"{where}_speedup_int8", each.speedup_int8, ends)
    return found


def table_csv(names: Sequence[str], rows: Any) -> bytes:
    """Return a table as CSV; names and texts are made safe to display."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_cell, names))
    writer.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return a CSV cell; a text that a spreadsheet would take for a formula gets an apostrophe in front.

    Spreadsheets use the same escape. Numbers stay unchanged, negative ones too.
    """
    if not isinstance(value, str):
        return value
    text = shown(value)
    return f"'{text}" if text.startswith(_COMPUTED) else text


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
