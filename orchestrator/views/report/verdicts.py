"""What a gate found: a table for the terminal, and JUnit XML for a CI service."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.etree import ElementTree

from orchestrator.compare.against.figures import is_latency, is_speedup
from orchestrator.compare.against.gate import counted
from orchestrator.compare.against.verdicts import Verdict
from orchestrator.core.metrics import percent
from orchestrator.core.redact import shown
from orchestrator.views.report.columns import difference
from orchestrator.views.report.tables import aligned, two_seeds_note

HEADINGS = ("asked %", "figure", "baseline", "now", "change [95% interval]", "limit", "verdict")
WIDTHS = (10, 20, 9, 9, 22, 7, 9)
NOTE = (
    "Test figures of the models selected on validation, paired by seed with the baseline: a metric passes where a loss "
    "of its limit is ruled out (one-sided 97.5% limit), a speed-up likewise by its ratio, a size where no seed's has "
    "grown by more."
)


def gate_table(found: Sequence[Verdict]) -> Iterator[str]:
    """Yield the lines of the table, why what does not pass does not, and a count."""
    of_points = [each for each in found if each.point is not None]
    yield from verdict_table(HEADINGS, WIDTHS, [(each, (*cells(each), each.status)) for each in of_points])
    for each in found:
        if each.reason:
            yield f"{each.status}: {title_of(each)}: {each.reason}"
    yield NOTE
    yield from two_seeds_note(each.change for each in found)
    yield f"{counted(found)}."


def verdict_table(
    headings: Sequence[str], widths: Sequence[int], rows: Sequence[tuple[Verdict, Sequence[str]]]
) -> Iterator[str]:
    """Yield the lines of a table of verdicts on points, panel by panel and line by line.

    Args:
        widths: of the columns at least, in characters
        rows: verdicts with the cells that stand for them
    """
    columns = zip(headings, *(cells for _, cells in rows), strict=True)
    widths = [max(least, *map(len, column)) for least, column in zip(widths, columns, strict=True)]
    for title, panel in groupby(rows, key=lambda row: row[0].point and row[0].point.panel):
        yield str(title)
        yield aligned(headings, widths)
        for line, of_line in groupby(panel, key=lambda row: row[0].point and row[0].point.line):
            yield str(line)
            for _, cells in of_line:
                yield aligned(cells, widths)
        yield ""


def title_of(verdict: Verdict) -> str:
    """Return what a verdict is on, as a sentence names it."""
    name = verdict.point
    if name is None:
        return f"trial {verdict.figure}"
    at = "" if name.round == 0 else f" at {percent(name.sparsity)}%"
    return f"{name.line}{at}, {verdict.figure}"


def junit(found: Sequence[Verdict], allow_undecided: bool, name: str) -> bytes:
    """Return JUnit XML of a test case for each limit; skipped where undecided is allowed.

    Args:
        name: of the suite, such as the sweep's
    """
    cases = []
    for each in found:
        of = "trials" if each.point is None else f"{each.point.panel}.{each.point.line}"
        case = ElementTree.Element("testcase", classname=shown(of), name=shown(title_of(each)), time="0")
        if each.status != "pass":
            allowed = each.status == "undecided" and allow_undecided
            kind: dict[str, str] = {} if allowed else {"type": each.status}
            ElementTree.SubElement(case, "skipped" if allowed else "failure", kind, message=shown(each.reason))
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


def cells(verdict: Verdict) -> tuple[str, ...]:
    """Return sparsity, figure, the values then and now, the change and its limit as texts."""
    metric, name = verdict.metric, verdict.point
    assert name is not None
    sparsity = percent(name.sparsity) if name.round else "dense"
    measured = is_latency(verdict.figure) or is_speedup(verdict.figure)  # whose unit is that of the change
    figure = verdict.figure if metric is None or measured else f"{verdict.figure} {metric.unit}".rstrip()
    if verdict.now is None or verdict.baseline is None:
        return sparsity, figure, "", "", "", ""
    if metric is None:
        change = "" if verdict.change is None else f"{verdict.change.mean:+.1%}"
        values = f"{verdict.baseline:,.0f}", f"{verdict.now:,.0f}", change, f"{verdict.margin:+.1%}"
    elif measured:
        latency = is_latency(verdict.figure)
        then, now = (f"{each:.3g}" if latency else f"{each:.2f}x" for each in (verdict.baseline, verdict.now))
        limit = metric.written(verdict.margin if latency else -verdict.margin, "+")
        change = difference(verdict.change, metric)
        values = then, now, f"{change} {metric.unit}" if change else "", f"{limit} {metric.unit}"
    else:
        sign = -1 if metric.better == "higher" else 1
        values = (
            *(metric.written(verdict.baseline), metric.written(verdict.now)),
            *(difference(verdict.change, metric), metric.written(sign * verdict.margin, "+")),
        )
    return sparsity, figure, *values
