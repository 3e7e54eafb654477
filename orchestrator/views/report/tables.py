"""A comparison as text: the table for the terminal, CSV and JSON."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from itertools import islice
from typing import TYPE_CHECKING, Any

from orchestrator.compare.audit import Finding
from orchestrator.compare.comparison import Comparison, Point, Row
from orchestrator.compare.statistics import Estimate

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = ("sparsity %", "test accuracy %", "vs dense [95% interval]", "match", "size", "MACs", "seeds")
WIDTHS = (10, 17, 24, 5, 6, 6, 5)
FAILURES_LISTED = 10


def cells(point: Point) -> tuple[str, ...]:
    """Return a point's cells under `COLUMNS`; accuracies and differences in percent."""
    dense = point.round == 0
    return (
        "dense" if dense else percent(point.sparsity),
        spread(point.accuracy) + ("*" if point.best else " "),
        "" if dense else difference(point.difference),
        "" if dense else verdict(point.matching),
        ratio(point.compression),
        ratio(point.speedup),
        str(len(point.seeds)),
    )


def ratio(value: float) -> str:
    """24.6 -> 24.6x."""
    return f"{value:.1f}x" if math.isfinite(value) else "inf"


def percent(fraction: float) -> str:
    """0.96875 -> 96.88."""
    return f"{100 * fraction:.2f}"


def spread(found: Estimate | None) -> str:
    """Mean and standard deviation, in percent."""
    if found is None:
        return "not finite"
    return percent(found.mean) + ("" if found.std is None else f" ± {percent(found.std)}")


def interval(found: Estimate | None) -> str:
    """The ends of the interval of the mean, in percent."""
    if found is None or found.low is None or found.high is None:
        return ""
    return f"{percent(found.low)} – {percent(found.high)}"


def difference(found: Estimate | None) -> str:
    """Mean difference with its interval, in percentage points."""
    if found is None:
        return ""
    ends = "" if found.low is None or found.high is None else f" [{100 * found.low:+.2f}, {100 * found.high:+.2f}]"
    return f"{100 * found.mean:+.2f}{ends}"


def verdict(matching: bool | None) -> str:
    """Say whether a point matches dense; with one seed it cannot be said."""
    return "–" if matching is None else "yes" if matching else "no"


def sections(comparison: Comparison) -> Iterator[tuple[str, list[Point]]]:
    """Yield (title, points to show) for each panel: dense first, then line by line."""
    for model, data in comparison.panels:
        shown = [point for point in comparison.dense if (point.model, point.data) == (model, data)]
        shown += [point for point in comparison.operating_points if (point.model, point.data) == (model, data)]
        yield f"{model} on {data}", shown


def text_table(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the table, 79 characters wide: for each panel dense first, then line by line."""
    for title, points in sections(comparison):
        yield title
        yield _aligned(COLUMNS)
        before = "dense"
        for point in points:
            if point.line != before:
                yield point.line
                before = point.line
            yield _aligned(cells(point))
        yield ""


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, the largest matching sparsities, what it cost and what failed."""
    from rich.text import Text

    for line in text_table(comparison):
        style = "bold" if "*" in line or not line.startswith(" ") else ""
        console.print(Text(line, style=style), soft_wrap=True)
    for line in notes(comparison):
        console.print(Text(line), soft_wrap=True)


def print_audit(findings: Sequence[Finding], console: Console) -> None:
    """Print how the audit went, and each rule that fails with its reason."""
    from rich.text import Text

    for line in audit_notes(findings):
        console.print(Text(line), soft_wrap=True)


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences below the table."""
    if not comparison.points:
        yield from failure_notes(comparison)
        return
    best = " *: the highest mean at this sparsity." if any(point.best for point in comparison.points) else ""
    yield (
        f"Test accuracy: mean ± standard deviation over seeds, of the model selected on validation.{best} vs dense: "
        "percentage points, paired by seed. match: the mean lies within the 95% interval of dense, or above. "
        "size, MACs: dense / remaining."
    )
    for key, point in comparison.largest_matching.items():
        model, data, line = key
        found = "none" if point is None else f"{percent(point.sparsity)}%, {ratio(point.compression)} smaller"
        if all(each.matching is None for each in comparison.points if (each.model, each.data, each.line) == key):
            found = "not known, as an interval takes two seeds or more"
        where = f" ({model} on {data})" if len(comparison.panels) > 1 else ""
        yield f"Largest matching sparsity of {line}{where}: {found}"
    cost = comparison.cost
    if cost.unshared_steps > cost.steps:
        yield (
            f"Training took {cost.steps:,} steps and {cost.seconds:,.1f} s of work; without shared stages it would "
            f"have taken {cost.unshared_steps:,} steps and {cost.unshared_seconds:,.1f} s."
        )
    yield from failure_notes(comparison)


def audit_notes(findings: Sequence[Finding]) -> Iterator[str]:
    """Yield how the audit went, and a line for each rule that fails."""
    failed = [finding for finding in findings if finding.verdict == "fail"]
    passed = sum(finding.verdict == "pass" for finding in findings)
    idle = len(findings) - passed - len(failed)
    yield f"Audit: {passed} of {len(findings)} rules pass, {len(failed)} fail" + (
        f", {idle} do not apply." if idle else "."
    )
    for finding in failed:
        yield f"  {finding.rule}: {finding.reason}"


def failure_notes(comparison: Comparison) -> Iterator[str]:
    """Yield what did not finish, with the reasons."""
    missing = [name for name, status in comparison.trials.items() if status != "finished"]
    if not missing:
        return
    failed = [name for name in missing if comparison.trials[name] == "failed"]
    yield f"{len(missing)} of {len(comparison.trials)} trials did not finish, {len(failed)} of them failed:"
    reasons: dict[str, list[str]] = {}
    for name in failed or missing:
        reasons.setdefault(comparison.failures.get(name, "not run"), []).append(name)
    for reason, (first, *others) in islice(reasons.items(), FAILURES_LISTED):
        yield f"  {first}{f' and {len(others)} more' if others else ''}: {reason}"
    if len(reasons) > FAILURES_LISTED:
        yield f"  and {len(reasons) - FAILURES_LISTED} more reasons"


def rows_csv(comparison: Comparison) -> bytes:
    """Return the tidy table: a line for each trial and round."""
    return _csv([field.name for field in fields(Row)], (vars(row) for row in comparison.rows))


def points_csv(comparison: Comparison) -> bytes:
    """Return the summary: a line for each operating point, estimates spread over columns."""
    points = [_flat(point) for point in (*comparison.dense, *comparison.operating_points)]
    return _csv(list(dict.fromkeys(name for point in points for name in point)), points)


def as_json(comparison: Comparison) -> bytes:
    """Return everything as JSON; what is not finite becomes null."""
    return (json.dumps(_finite(comparison.to_json()), indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _aligned(row: Sequence[str]) -> str:
    return " ".join(cell.rjust(width) for cell, width in zip(row, WIDTHS, strict=True))


def _flat(point: Point) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in asdict(point).items():
        if name in ("accuracy", "val_accuracy", "val_accuracy_before", "difference"):
            for part in ("mean", "std", "low", "high"):
                flat[f"{name}_{part}"] = None if value is None else value[part]
        elif name != "stages":
            flat[name] = " ".join(map(str, value)) if isinstance(value, tuple) else value
    return flat


def _csv(names: Sequence[str], rows: Any) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
