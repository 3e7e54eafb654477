"""Two sweeps, or a sweep and its baseline, side by side: text, CSV for two sweeps, JUnit XML for a CI service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from xml.etree import ElementTree

from orchestrator.compare.baseline import SPEED_MARGIN
from orchestrator.compare.comparison import Point
from orchestrator.compare.pairing import is_latency, is_size, is_speedup
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.statistics import LEVEL
from orchestrator.compare.two_sweeps import SPARSITY, Difference, PairedPoint, TwoSweeps
from orchestrator.compare.verdicts import LATENCY, SPEEDUP, Verdict, counted
from orchestrator.core.redact import shown
from orchestrator.planning.number_formats import (
    first_few,
    in_points,
    milliseconds,
    percent,
    ratio,
    significant,
    whole_number,
)
from orchestrator.views.report.columns import difference
from orchestrator.views.report.plain_files import parts, table_csv
from orchestrator.views.report.table import Row, Table
from orchestrator.views.report.tables import failure_notes, two_seeds_note

HEADINGS = ("asked %", "figure", "baseline", "now", "change [95% interval]", "limit", "verdict")
WIDTHS = (10, 20, 9, 9, 22, 7, 9)
NOTE = (
    "Test figures of the models selected on validation, paired by seed with the baseline: a metric passes if a loss of "
    "its limit is ruled out (one-sided 97.5% limit), a speed-up by the same test of its ratio, a size if it has not "
    "grown by more at any seed."
)


def gate_table(found: Sequence[Verdict]) -> Iterator[str]:
    """Yield the counts, the reasons of verdicts that are not a pass, the most severe first, and the table."""
    yield f"{counted(found)}."
    yield from reasons(found)
    yield ""
    of_points = [each for each in found if each.point is not None]
    yield from verdict_table(HEADINGS, WIDTHS, [(each, (*cells(each), each.status)) for each in of_points])
    yield NOTE
    yield from two_seeds_note(each.change for each in found)


def reasons(found: Sequence[Verdict]) -> Iterator[str]:
    """Yield a line for each reason why limits do not pass: losses, then what is missing, then undecided limits."""
    limits: dict[tuple[str, str], list[str]] = {}
    for each in sorted((each for each in found if each.reason), key=_severity):
        limits.setdefault((each.status, each.reason), []).append(title_of(each))
    for (status, reason), (first, *others) in limits.items():
        yield f"{status}: {first}{f' and {len(others)} more' if others else ''}: {reason}"


def _severity(verdict: Verdict) -> tuple[bool, bool]:
    """Sort key: measured losses, failures without a figure, undecided limits."""
    return verdict.status != "fail", verdict.now is None


def verdict_table(
    headings: Sequence[str], widths: Sequence[int], rows: Sequence[tuple[Verdict, Sequence[str]]]
) -> Iterator[str]:
    """Yield the lines of a table of verdicts on points, panel by panel and line by line.

    Args:
        headings: column headings
        widths: minimum column widths, in characters
        rows: verdicts with their cells
    """
    columns = zip(headings, *(cells for _, cells in rows), strict=True)
    widths = [max(least, *map(len, column)) for least, column in zip(widths, columns, strict=True)]
    for title, panel in groupby(rows, key=lambda row: row[0].point and row[0].point.panel):
        yield str(title)
        lines = [Row(str(verdict.point and verdict.point.line), cells) for verdict, cells in panel]
        yield from Table(headings, lines, widths).text()
        yield ""


def title_of(verdict: Verdict) -> str:
    """Return the subject of a verdict, for messages: line, sparsity and figure, or the failed trial."""
    name = verdict.point
    if name is None:
        return f"trial {verdict.figure}"
    of = "" if name.asked_of in ("", WEIGHTS) else f" of {name.asked_of}"
    at = "" if name.round == 0 else f" at {percent(name.sparsity)}{of}"
    return f"{name.line}{at}, {verdict.figure}"


def junit(found: Sequence[Verdict], allow_undecided: bool, name: str) -> bytes:
    """Return JUnit XML with a test case for each limit.

    Args:
        found: verdicts
        allow_undecided: report an undecided limit as skipped instead of failed
        name: name of the test suite, for example the sweep's
    """
    cases = []
    for each in found:
        of = "trials" if each.point is None else f"{each.point.panel}.{each.point.line}"
        case = ElementTree.Element("testcase", classname=shown(of), name=shown(title_of(each)), time="0")
        if each.status != "pass":
            allowed = each.status == "undecided" and allow_undecided
            kind: dict[str, str] = {} if allowed else {"type": each.status}
            ElementTree.SubElement(case, "skipped" if allowed else "failure", kind, message=shown(_with_figures(each)))
        cases.append(case)
    counts = {
        "tests": str(len(cases)),
        "failures": str(sum(case.find("failure") is not None for case in cases)),
        "errors": "0",
        "skipped": str(sum(case.find("skipped") is not None for case in cases)),
    }
    suites = ElementTree.Element("testsuites", counts)
    ElementTree.SubElement(suites, "testsuite", counts, name=shown(name)).extend(cases)
    ElementTree.indent(suites)
    content: bytes = ElementTree.tostring(suites, encoding="utf-8", xml_declaration=True)
    return content + b"\n"


def _with_figures(verdict: Verdict) -> str:
    """Return the reason why a limit does not pass, with the figures and the seeds."""
    if verdict.point is None:
        return verdict.reason
    _, figure, baseline, now, _, limit = cells(verdict)
    seeds = ", ".join(map(str, verdict.seeds))
    named = {"baseline": baseline, "now": now, "limit": limit, "seeds": seeds}
    return f"{verdict.reason}; {figure}: {', '.join(f'{name} {text}' for name, text in named.items() if text)}"


def cells(verdict: Verdict) -> tuple[str, ...]:
    """Return the cells: sparsity, figure, value before, value now, change and limit; empty for a missing value."""
    metric, name, figure, change = verdict.metric, verdict.point, verdict.figure, ""
    assert name is not None
    sparsity = in_points(name.sparsity) if name.round else "dense"
    measured = is_latency(figure) or is_speedup(figure)  # the metric's unit is the unit of the change
    form, limit = _written(verdict)
    then, now = ("" if each is None else form(each) for each in (verdict.baseline, verdict.now))
    if metric is None:
        change = "" if verdict.change is None else percent(verdict.change.mean, 1, "+")
    else:
        change = difference(verdict.change, metric, metric.unit if measured else "")
    return (
        sparsity,
        figure if metric is None or measured else f"{figure} {metric.unit}".rstrip(),
        then,
        now,
        change,
        limit,
    )


def _written(verdict: Verdict) -> tuple[Callable[[float], str], str]:
    """Return the function that writes a figure's values, and the limit as text."""
    metric, margin = verdict.metric, verdict.margin
    if is_size(verdict.figure):
        return whole_number, percent(margin, 1, "+")
    if metric is None:  # the sweep has no such figure, so its format is not known
        return significant, significant(margin)
    if is_latency(verdict.figure):
        return milliseconds, f"{metric.written(margin, '+')}{metric.unit}"
    if is_speedup(verdict.figure):
        return ratio, f"{metric.written(-margin, '+')}{metric.unit}"
    return metric.written, metric.written(-margin if metric.better == "higher" else margin, "+")


FILE = "comparison/differences.csv"
TWO_HEADINGS = ("asked %", "figure", "first", "second", "change [95% interval]", "seeds", "verdict")
TWO_WIDTHS = (10, 20, 8, 8, 22, 5, 9)
LISTED, LETTERS = 20, 80
"""Maximum number of lines named, and of characters shown of a value."""


def two_sweeps_text(found: TwoSweeps) -> Iterator[str]:
    """Yield the text: settings that differ between the sweeps, the table, and notes on it."""
    yield f"first:  {found.first.name}"
    yield f"second: {found.second.name}"
    yield from _differing(found)
    yield ""
    rows = [
        (each.verdict, (*cells(each.verdict)[:5], str(len(each.seeds)), _word(point, each)))
        for point in found.points
        for each in point.differences
    ]
    yield from verdict_table(TWO_HEADINGS, TWO_WIDTHS, rows)
    for point in found.points:
        for each in point.differences:
            if each.word == "undecided" and each.verdict.reason:
                yield f"undecided: {title_of(each.verdict)}: {each.verdict.reason}"
        if point.same_stages and any(each.word != "the same" for each in point.differences[:1]):
            yield f"{title_of(point.differences[0].verdict)}: the stages are the same, but their results are not"
    yield from _notes(found)


def two_sweeps_csv(found: TwoSweeps) -> bytes:
    """Return one CSV row for each difference, in the figures' own scales."""
    rows = []
    for point in found.points:
        for each in point.differences:
            verdict, change = each.verdict, each.verdict.change
            rows.append(
                {
                    **point.name._asdict(),
                    "figure": verdict.figure,
                    "first": verdict.baseline,
                    "second": verdict.now,
                    **parts("change", change),
                    "margin": verdict.margin,
                    "verdict": each.word,
                    "reason": verdict.reason if each.word == "undecided" else "",
                    "same_stages": point.same_stages,
                    "seeds": " ".join(map(str, each.seeds)),
                }
            )
    return table_csv(list(rows[0]), rows)


def _differing(found: TwoSweeps) -> Iterator[str]:
    if not found.differing:
        yield "The sweeps do not differ in settings, code or environment."
        return
    yield "different between the sweeps, equal within each:"
    rows = [(name, *map(_value, values)) for name, values in found.differing.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *values in rows:
        yield f"  {name.ljust(widths[0])}  {values[0].ljust(widths[1])}  {values[1]}".rstrip()


def _value(text: str) -> str:
    if not text:
        return "–"
    return text if len(text) <= LETTERS else f"{text[:LETTERS]}..."


def _word(point: PairedPoint, each: Difference) -> str:
    return "the same stages" if each.word == "the same" and point.same_stages else each.word


def _notes(found: TwoSweeps) -> Iterator[str]:
    renamed = dict.fromkeys(point.name.line for point in found.points if " | " in point.name.line)
    for line in renamed:
        yield f"Paired in spite of different names: {line}."
    for side, points, others in ((found.first, found.only[0], 0), (found.second, found.only[1], 1)):
        if points:
            yield f"Only in {side.name}: {_listed(points)}."
        seeds = dict.fromkeys(point.only[others] for point in found.points if point.only[others])
        for each in seeds:
            count = sum(point.only[others] == each for point in found.points)
            yield f"Seeds only in {side.name}: {', '.join(map(str, each))}, at {count} of {len(found.points)} points."
    yield from _asked_notes(found)
    yield (
        "Test figures of the models selected on validation; change: second - first, paired by seed; for speed-ups "
        "and latencies the ratio, for sizes the largest growth. better, worse: the interval excludes 0; no worse: "
        f"{' or '.join(_margins(found))} is ruled out (one-sided 97.5% limit); open: it is not."
    )
    yield from two_seeds_note(each.verdict.change for point in found.points for each in point.differences)
    yield from _many(found)
    for side in (found.first, found.second):
        lines = list(failure_notes(side.comparison))
        if lines:
            yield f"In {side.name} {lines[0]}"
            yield from lines[1:]


def _asked_notes(found: TwoSweeps) -> Iterator[str]:
    """Yield notes on the quantity that sparsities are fractions of, unless it is weights and sparsities are equal."""
    with_sparsity = (
        point for point in found.points if any(each.verdict.metric == SPARSITY for each in point.differences)
    )
    reached = {point.asked_of for point in with_sparsity}
    for first, second in dict.fromkeys(point.asked_of for point in found.points):
        if first != second:
            yield (
                f"asked: fraction of {first} in {found.first.name}, of {second} in {found.second.name}; the networks "
                "of a row differ in size, so both sparsities are shown and sizes have no verdict."
            )
        elif first != WEIGHTS:
            yield f"asked: fraction of {first}; sparsity: achieved fraction of the prunable weights."
        elif (first, second) in reached:
            yield (
                "asked: fraction of weights; if the achieved sparsities differ, both are shown and sizes have no "
                "verdict."
            )


def _margins(found: TwoSweeps) -> Iterator[str]:
    """Yield the losses that the verdict `no worse` rules out, without repetition."""
    verdicts = [each.verdict for point in found.points for each in point.differences]
    metrics = dict.fromkeys(each.metric for each in verdicts if each.metric not in (None, SPARSITY, SPEEDUP, LATENCY))
    yield from (metric.loss for metric in metrics if metric is not None)
    if any(each.metric in (SPEEDUP, LATENCY) for each in verdicts):
        yield f"a loss of {percent(SPEED_MARGIN, 0)} of a speed-up or a latency"


def _many(found: TwoSweeps) -> Iterator[str]:
    """Yield the number of intervals, and how many of them exclude 0, which some do by chance."""
    count, (alone, together) = len(found.tested), found.beyond_zero
    if not count:
        yield "No difference of a primary metric has an interval: an interval needs two or more seeds that differ."
        return
    yield (
        f"Differences of primary metrics with an interval: {count}. Single {percent(LEVEL, 0)} intervals exclude 0 at "
        f"{alone} of them (by chance at {significant(count * (1 - LEVEL), 2)} if nothing differed), simultaneous "
        f"intervals ({percent(found.level_together)} each, Bonferroni) at {together}."
    )


def _listed(points: Sequence[Point]) -> str:
    lines: dict[str, list[str]] = {}
    for point in points:
        lines.setdefault(f"{point.line} of {point.model} on {point.data}", []).append(percent(point.asked_sparsity))
    listed = [line if line.startswith("dense") else f"{line} at {', '.join(at)}" for line, at in lines.items()]
    return first_few(listed, LISTED, ", ")
