"""Gate results: a table for the terminal, and JUnit XML for a CI service."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from xml.etree import ElementTree

from orchestrator.compare.pairing import is_latency, is_size, is_speedup
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.verdicts import Verdict, counted
from orchestrator.core.redact import shown
from orchestrator.planning.number_formats import in_points, milliseconds, percent, ratio, significant, whole_number
from orchestrator.views.report.columns import difference
from orchestrator.views.report.table import Row, Table
from orchestrator.views.report.tables import two_seeds_note

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
