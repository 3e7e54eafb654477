"""A comparison as files that programs read: CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any

from orchestrator.compare.chosen import Chosen
from orchestrator.compare.comparison import Comparison, Point, Row
from orchestrator.compare.deployed import Deployed


def rows_csv(comparison: Comparison) -> bytes:
    """Return the tidy table: a line for each trial and round; of other metrics and test sets the columns stand last.

    Before these stand those of what was chosen, and what scoring took.
    """
    others = sorted({name for row in comparison.rows for name in row.others})
    names = [field.name for field in fields(Row) if field.name not in ("chosen", "others")]
    return table_csv(
        [*names, *(field.name for field in fields(Chosen)), *others],
        ({name: vars(row)[name] for name in names} | vars(row.chosen) | {**row.others} for row in comparison.rows),
    )


def points_csv(comparison: Comparison) -> bytes:
    """Return the summary: a line for each operating point, estimates spread over columns."""
    points = [_flat(point) for point in (*comparison.dense, *comparison.operating_points)]
    return table_csv(list(dict.fromkeys(name for point in points for name in point)), points)


def as_json(comparison: Comparison) -> bytes:
    """Return everything as JSON; what is not finite becomes null."""
    return (json.dumps(_finite(comparison.to_json()), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _flat(point: Point) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in asdict(point).items():
        if name == "metric":
            flat[name] = point.metric.name
        elif name in ("test", "val", "val_before", "difference"):
            for part in ("mean", "std", "low", "high"):
                flat[f"{name}_{part}"] = None if value is None else value[part]
        elif name == "further":
            for each in point.further:
                for what, found in (("test", each.test), ("difference", each.difference)):
                    flat[f"{each.name}_{what}_mean"] = None if found is None else found.mean
        elif name == "deployed":
            for measured in point.deployed:
                flat |= _measured(measured)
        elif name == "harmed":
            flat[name] = " ".join(f"{each.label}:{each.loss:.6g}" for each in point.harmed)
        elif name != "stages":
            flat[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return flat


def _measured(each: Deployed) -> dict[str, Any]:
    """Return the columns of a deployment; of several kinds of machine the last one's."""
    where = f"{each.format}_{each.batch_size}"
    estimate = {f"{where}_speedup_{part}": getattr(each.speedup, part) for part in ("mean", "low", "high")}
    times = {f"{where}_latency_ms": each.latency_ms, f"{where}_dense_ms": each.dense_ms}
    sizes = {f"{each.format}_bytes": each.bytes, f"{each.format}_dense_bytes": each.dense_bytes}
    return sizes | times | estimate | {f"{where}_hardware": each.hardware}


def table_csv(names: Sequence[str], rows: Any) -> bytes:
    """Return a table as CSV; what a spreadsheet would compute is text."""
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _cell(value) for name, value in row.items()} for row in rows)
    return text.getvalue().encode()


def _cell(value: Any) -> Any:
    """Return a CSV cell; a text that a spreadsheet would compute begins with an apostrophe."""
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")) else value


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
