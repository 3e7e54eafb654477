"""Differences between two sweeps, as text for the terminal and as CSV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.compare.baseline import SPEED_MARGIN
from orchestrator.compare.comparison import Point
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.statistics import LEVEL
from orchestrator.compare.two_sweeps import SPARSITY, Difference, PairedPoint, TwoSweeps
from orchestrator.compare.verdicts import LATENCY, SPEEDUP
from orchestrator.planning.number_formats import percent, significant
from orchestrator.views.report.gate_report import cells, title_of, verdict_table
from orchestrator.views.report.plain_files import table_csv
from orchestrator.views.report.tables import failure_notes, two_seeds_note

FILE = "comparison/differences.csv"
HEADINGS = ("asked %", "figure", "first", "second", "change [95% interval]", "seeds", "verdict")
WIDTHS = (10, 20, 8, 8, 22, 5, 9)
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
    yield from verdict_table(HEADINGS, WIDTHS, rows)
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
            interval = {name: getattr(change, name, None) for name in ("mean", "std", "low", "high")}
            rows.append(
                {
                    **point.name._asdict(),
                    "figure": verdict.figure,
                    "first": verdict.baseline,
                    "second": verdict.now,
                    **{f"change_{name}": value for name, value in interval.items()},
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
    yield from _asked(found)
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


def _asked(found: TwoSweeps) -> Iterator[str]:
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
    return ", ".join(listed[:LISTED]) + (f" and {len(listed) - LISTED} more" if len(listed) > LISTED else "")
