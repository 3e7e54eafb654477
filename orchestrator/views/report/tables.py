"""A comparison as text: the table for the terminal, and what is said below it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from orchestrator.compare.audit.checklist import Finding
from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.further import Further
from orchestrator.compare.statistics import Estimate
from orchestrator.core.events import SweepInfo
from orchestrator.core.metrics import Metric, percent
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import shown
from orchestrator.core.specs import Plan
from orchestrator.planning.forecast import afterwards
from orchestrator.views.report.columns import Column, measured_columns

if TYPE_CHECKING:
    from rich.console import Console

FAILURES_LISTED, LINES_LISTED = 10, 40


COST = Column(
    "cost",
    lambda p: f"{p.total_cost:,.0f}",
    hint="optimizer steps from initialisation, and the examples that scores read, in steps",
)
COLUMNS = (
    Column(
        "sparsity %", lambda p: percent(p.sparsity) if p.round else "dense", 10, "achieved, of the prunable weights"
    ),
    Column(
        "test {metric}",
        lambda p: spread(p.test, p.metric) + ("*" if p.best else " "),
        15,
        "mean ± standard deviation",
    ),
    Column("95% interval", lambda p: interval(p.test, p.metric)),
    Column(
        "vs dense [95% interval]",
        lambda p: difference(p.difference, p.metric) if p.round else "",
        23,
        "paired by seed; of fractions in percentage points",
    ),
    Column(
        "match",
        lambda p: verdict(p) if p.round else "",
        8,
        "whether a loss of the margin or more is ruled out; –: not tested, after a line's first no",
    ),
    Column(
        "before fine-tuning",
        lambda p: spread(p.val_before, p.metric) if p.val_before else "",
        hint="the same on the validation split",
    ),
    Column("size", lambda p: ratio(p.compression), 6, "parameters, dense / remaining"),
    Column("MACs", lambda p: ratio(p.speedup), 6, "multiply-accumulates, dense / remaining: a theoretical speed-up"),
    Column("seeds", lambda p: str(len(p.seeds)), 5),
    Column("steps", lambda p: f"{p.total_steps:,.0f}", hint="optimizer steps from initialisation"),
    COST,
    Column("own", lambda p: f"{p.own_steps:,.0f}", hint="of these, steps that no other trial shares"),
    Column("seconds", lambda p: f"{p.total_seconds:,.1f}", hint="of work, from initialisation"),
)
HARM = Column(
    "harmed most",
    lambda p: ", ".join(f"{each.label} -{percent(each.loss)}" for each in p.harmed),
    hint="classes that lose most against dense, in percentage points, mean over seeds",
)
NARROW = tuple(column for column in COLUMNS if column.width)


def narrow(comparison: Comparison, points: Sequence[Point]) -> tuple[Column, ...]:
    """Return the columns of a table of text: with the cost where what is compared among these points differs in it."""
    unequal = {id(point) for point, _ in comparison.costlier}
    return (*NARROW, COST) if any(id(point) in unequal for point in points) else NARROW


def columns(points: Sequence[Point]) -> tuple[Column, ...]:
    """Return the columns of the page: those of every comparison, and what these points show beside."""
    shown = [column for name in names_of_further(points) for column in _on_further(name)]
    return (*COLUMNS, *shown, *measured_columns(points), *([HARM] if any(point.harmed for point in points) else []))


def names_of_further(points: Sequence[Point]) -> list[str]:
    """Return the names of the further test sets."""
    return list(dict.fromkeys(each.name for point in points for each in point.further))


def _on_further(name: str) -> Iterator[Column]:
    def on(point: Point) -> Further | None:
        return next((each for each in point.further if each.name == name), None)

    yield Column(f"{name} {{metric}}", lambda p: spread(each.test, p.metric) if (each := on(p)) else "", 15)
    yield Column(
        "vs dense [95% interval]",
        lambda p: difference(each.difference, p.metric) if p.round and (each := on(p)) else "",
        23,
    )


def ratio(value: float) -> str:
    """24.6 -> 24.6x."""
    return f"{value:.1f}x" if math.isfinite(value) else "inf"


def spread(estimate: Estimate | None, metric: Metric) -> str:
    """Mean and standard deviation."""
    if estimate is None:
        return "not finite"
    return metric.written(estimate.mean) + ("" if estimate.std is None else f" ± {metric.written(estimate.std)}")


def interval(estimate: Estimate | None, metric: Metric) -> str:
    """The ends of the interval of the mean."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{metric.written(estimate.low)} – {metric.written(estimate.high)}"


def difference(estimate: Estimate | None, metric: Metric) -> str:
    """Mean difference with its interval, signed; of fractions in percentage points."""
    if estimate is None:
        return ""
    mean = metric.written(estimate.mean, "+")
    if estimate.low is None or estimate.high is None:
        return mean
    return f"{mean} [{metric.written(estimate.low, '+')}, {metric.written(estimate.high, '+')}]"


def verdict(point: Point) -> str:
    """Say whether a point matches dense, as short as its column is."""
    return "–" if point.matching in (None, "not tested") else str(point.matching)


def match_note(comparison: Comparison) -> str:
    """Say what a match is."""
    return (
        f"match: {' or '.join(metric.loss for metric in comparison.metrics)} against dense is ruled out "
        "(one-sided 97.5% limit of the paired difference), tested along each line from the least sparse point up to "
        "its first no; –: not tested; untested: a test takes two seeds or more that differ."
    )


def sections(comparison: Comparison) -> Iterator[tuple[str, list[Point]]]:
    """Yield (title, points to show) for each panel: dense first, then line by line."""
    for model, data in comparison.panels:
        shown = [point for point in comparison.dense if (point.model, point.data) == (model, data)]
        shown += [point for point in comparison.operating_points if (point.model, point.data) == (model, data)]
        yield f"{model} on {data}", shown


def text_table(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the table, 79 characters wide where figures are short, panel by panel."""
    for title, points in sections(comparison):
        yield title
        yield from _block(narrow(comparison, points), points)
        for name in names_of_further(points):
            yield f"{title}: {name}"
            yield from _block((COLUMNS[0], *_on_further(name)), points)
        if measured := [point for point in points if point.deployed]:
            yield f"{title}: deployed, times as fast as dense [95% interval]"
            yield from _block((COLUMNS[0], *measured_columns(measured)), measured)
        yield ""


def _block(shown: Sequence[Column], points: Sequence[Point]) -> Iterator[str]:
    rows = [[column.heading(points[0].metric) for column in shown]]
    rows += [[column.cell(point) for column in shown] for point in points]
    widths = [max(column.width, *map(len, cells)) for column, cells in zip(shown, zip(*rows, strict=True), strict=True)]
    yield aligned(rows[0], widths)
    before = "dense"
    for point, row in zip(points, rows[1:], strict=True):
        if point.line != before:
            yield point.line
            before = point.line
        yield aligned(row, widths)


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print the table, the largest matching sparsities, what it cost and what failed."""
    from rich.text import Text

    for line in text_table(comparison):
        style = "bold" if "*" in line or not line.startswith(" ") else ""
        console.print(Text(shown(line), style=style), soft_wrap=True)
    for line in notes(comparison):
        console.print(Text(shown(line)), soft_wrap=True)


def print_audit(findings: Sequence[Finding], console: Console) -> None:
    """Print how the audit went, and each rule that fails with its reason."""
    from rich.text import Text

    for line in audit_notes(findings):
        console.print(Text(shown(line)), soft_wrap=True)


def print_forecast(info: SweepInfo, plan: Plan, records: Mapping[str, StageRecord], console: Console) -> None:
    """Print what the last run was estimated to take and what it took, where that was estimated."""
    from rich.text import Text

    if info.forecast is not None:
        console.print(Text(afterwards(info.forecast, plan, records)), soft_wrap=True)


def notes(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences below the table."""
    if not comparison.points:
        yield from failure_notes(comparison)
        return
    best = " *: the best mean at this sparsity." if any(point.best for point in comparison.points) else ""
    names = " or ".join(f"{metric.title} ({metric.better} is better)" for metric in comparison.metrics)
    steps = f" {COST.name}: {COST.hint}." if comparison.costlier else ""
    points = "percentage points, " if any(metric.scale != 1 for metric in comparison.metrics) else ""
    yield (
        f"Test {names}: mean ± standard deviation over seeds, of the model selected on validation.{best} "
        f"vs dense: {points}paired by seed. size, MACs: dense / remaining.{steps}"
    )
    yield match_note(comparison)
    largest = comparison.largest_matching
    for key in islice(comparison.lines, LINES_LISTED):
        model, data, line = key
        shown = "not known, as a test takes two seeds or more that differ" if key not in largest else "none"
        if point := largest.get(key):
            shown = f"{percent(point.sparsity)}%, {ratio(point.compression)} smaller"
        panel = f" ({model} on {data})" if len(comparison.panels) > 1 else ""
        yield f"Largest matching sparsity of {line}{panel}: {shown}"
        sparsest = max(comparison.lines[key], key=lambda point: point.sparsity)
        if sparsest.harmed:
            shown = ", ".join(f"{each.label} (-{percent(each.loss)})" for each in sparsest.harmed)
            yield f"Classes that {line}{panel} at {percent(sparsest.sparsity)}% harms most, in points: {shown}"
    if (more := len(comparison.lines) - LINES_LISTED) > 0:
        yield f"Those of {more:,} more lines are in summary.csv of the report."
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
        lacking = "trained, not measured" if comparison.trials[name] == "unmeasured" else "not run"
        reasons.setdefault(comparison.failures.get(name, lacking), []).append(name)
    for reason, (first, *others) in islice(reasons.items(), FAILURES_LISTED):
        yield f"  {first}{f' and {len(others)} more' if others else ''}: {reason}"
    if len(reasons) > FAILURES_LISTED:
        yield f"  and {len(reasons) - FAILURES_LISTED} more reasons"


def aligned(row: Iterable[str], widths: Iterable[int]) -> str:
    """Return the cells of a line of a table, each at the right of its column."""
    return " ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
