"""The best method at one sparsity against each other method, paired by seed: as text and as an HTML table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchestrator.compare.comparison import Comparison, Level, Point
from orchestrator.compare.statistics import Estimate, has_spread, paired_difference
from orchestrator.core.redact import html
from orchestrator.planning.number_formats import percent, whole_number
from orchestrator.views.report.columns import difference
from orchestrator.views.report.table import Row, Table

ROWS = 200
"""Maximum number of pairs on the page."""
LINES = 20
"""Maximum number of pairs in the terminal."""
NOTE = (
    "The best mean at each sparsity minus each other method's, on test, paired by seed, with its 95% interval. An "
    "interval that contains 0 does not tell the two apart. The best is chosen by the same figures, so its lead is a "
    "little too large; a match with dense is tested in the table above, and says nothing about the best method."
)


@dataclass(frozen=True)
class MethodPair:
    """Test metric of the best point at a level minus that of another line's point, over the seeds of both."""

    best: Point
    other: Point
    difference: Estimate

    @property
    def verdict(self) -> str:
        """Whether the interval tells the two apart."""
        found = self.difference
        if found.low is None or found.high is None or not has_spread(found):
            return "untested"
        return "no difference shown" if found.low <= 0 <= found.high else "better"


def method_pairs(comparison: Comparison) -> list[MethodPair]:
    """Return for each level with several lines the best point against each other line's, paired by seed."""
    tests = {row.stage: row.test for row in comparison.rows}
    levels: dict[Level, list[Point]] = {}
    for point in comparison.whole_points:
        levels.setdefault(point.level, []).append(point)
    pairs = []
    for points in levels.values():
        best = next((point for point in points if point.best), None)
        for other in points if best is not None else ():
            if best is None or other.line == best.line:
                continue
            one, two = (point.by_seed(tests) for point in (best, other))
            if (found := paired_difference(one, two)) is not None:
                pairs.append(MethodPair(best, other, found))
    return sorted(pairs, key=lambda pair: (comparison.panels.index(pair.best.line_key[:2]), pair.best.asked_sparsity))


def pair_lines(comparison: Comparison) -> Iterator[str]:
    """Yield a line of text for each pair of the best method and another."""
    pairs = method_pairs(comparison)
    if pairs:
        yield (
            "The best method against each other on test, paired by seed [95% interval]; the largest matching sparsity "
            "of a line says nothing about the best method"
        )
    for pair in pairs[:LINES]:
        panel = f" ({pair.best.model} on {pair.best.data})" if len(comparison.panels) > 1 else ""
        yield (
            f"  at {percent(pair.best.asked_sparsity)}{panel}: {pair.best.line} - {pair.other.line}: "
            f"{difference(pair.difference, pair.best.metric)}, {pair.verdict}"
        )
    if len(pairs) > LINES:
        yield f"  and {whole_number(len(pairs) - LINES)} more pairs, in the report"


def pair_table(comparison: Comparison) -> Iterator[str]:
    """Yield the HTML parts of the table of pairs; none if no level has several lines."""
    pairs, many = method_pairs(comparison), len(comparison.panels) > 1
    if not pairs:
        return
    rows = [
        Row(
            f"{pair.best.line} ({pair.best.model} on {pair.best.data})" if many else pair.best.line,
            (
                pair.other.line,
                f"{percent(pair.best.asked_sparsity)} of {pair.best.asked_of}",
                difference(pair.difference, pair.best.metric),
                str(pair.difference.n),
                pair.verdict,
            ),
        )
        for pair in pairs
    ]
    headings = ("minus", "asked", "difference [95% interval]", "seeds", "shown")
    yield f'<h2>The best method against each other</h2><p class="quiet">{html(NOTE)}</p>'
    yield from Table(headings, rows, label="best at its sparsity").html(ROWS)
