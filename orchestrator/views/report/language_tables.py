"""Tables for language models: differences by window of held-out text, and continuations of prompts side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.secondary.window_differences import DENSE, WindowDifference
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import html
from orchestrator.planning.number_formats import in_points, ratio, whole_number
from orchestrator.views.report.columns import difference

NATS = Metric("cross_entropy", "nats", "lower", margin=0.0, format=".4f")
LINES, ROWS, NETWORKS = 12, 200, 60
"""Maximum number of differences in the terminal and on the page, and of networks that continue a prompt."""
NOTE = (
    "By window: the cross-entropy of a method minus that of another on the same windows of held-out text, in nats per "
    "token, mean over seeds, with the interval over windows; perplexities differ by the factor exp(difference). Over "
    "seeds: the standard deviation of the differences, from draws of calibration and training. Both prune the same "
    "dense network."
)


@dataclass(frozen=True)
class Generation:
    """Continuation of a prompt by the network of a point's first seed."""

    panel: str
    line: str
    sparsity: float | None
    """None for a dense network."""
    figure: str
    """Primary metric on test."""
    prompt: str
    text: str


def window_lines(comparison: Comparison, title: str) -> Iterator[str]:
    """Yield lines of text with the differences between methods of a panel; from dense if it has one method."""
    here = [each for each in comparison.windows if f"{each.model} on {each.data}" == title]
    shown, before = [each for each in here if each.reference != DENSE] or here, ""
    if not shown:
        return
    yield f"{title}: cross-entropy by held-out window, nats per token"
    yield f"{'sparsity %':>10} {'difference [95% interval]':>26} {'perplexity':>11} {'windows':>8} {'over seeds':>12}"
    for each in shown[:LINES]:
        pair = f"{each.line} - {each.reference}{'' if each.text == 'test' else f' on {each.text}'}"
        yield from [pair] if pair != before else []
        before = pair
        cells = _cells(each)
        yield f"{cells[0]:>10} {cells[1]:>26} {cells[2]:>11} {cells[3]:>8} {cells[4]:>12}"
    if len(shown) > LINES:
        yield f"{whole_number(len(shown) - LINES)} more differences are in windows.csv of the report."
    yield NOTE


def window_table(comparison: Comparison) -> Iterator[str]:
    """Yield the HTML parts of the table of differences."""
    if not comparison.windows:
        return
    many = len(comparison.panels) > 1
    heads = (
        "method",
        "minus",
        "text",
        "sparsity %",
        "difference [95% interval]",
        "perplexity",
        "windows",
        "over seeds",
    )
    yield "<h2>Differences by held-out window</h2>"
    yield f'<p class="quiet">{html(NOTE)}</p><div class="scroll"><table><thead><tr>'
    yield "".join(f"<th>{html(head)}</th>" for head in heads) + "</tr></thead><tbody>"
    for each in comparison.windows[:ROWS]:
        name = f"{each.line} ({each.model} on {each.data})" if many else each.line
        cells = (name, each.reference, each.text, *_cells(each))
        yield f"<tr>{''.join(f'<td>{html(_typeset(cell))}</td>' for cell in cells)}</tr>"
    yield "</tbody></table></div>"
    if len(comparison.windows) > ROWS:
        yield f'<p class="quiet">{whole_number(len(comparison.windows) - ROWS)} more rows are in windows.csv.</p>'


def _cells(each: WindowDifference) -> tuple[str, str, str, str, str]:
    seeds = f"± {each.draws.std:.4f} ({each.draws.n})" if each.draws.std is not None else f"({each.draws.n})"
    factor = ratio(exp(min(each.windows.mean, 700.0)))
    return in_points(each.sparsity), difference(each.windows, NATS), factor, whole_number(each.windows.n), seeds


def _typeset(cell: str) -> str:
    return cell.replace("-", "\u2212") if cell[:1] in "+-" else cell


def generations(records: Mapping[str, StageRecord], comparison: Comparison) -> list[Generation]:
    """Return the continuations by the networks of each point's first seed, dense networks first."""
    return [
        Generation(
            f"{point.model} on {point.data}", point.line, *_described(point, records), each["prompt"], each["text"]
        )
        for point in (*comparison.dense, *comparison.operating_points)
        for each in records[point.stages[0]].generations
    ]


def _described(point: Point, records: Mapping[str, StageRecord]) -> tuple[float | None, str]:
    record = records[point.stages[0]]
    value = record.figure("test")
    return (point.sparsity if point.round else None), point.metric.written(value)


def generation_tables(written: Sequence[Generation]) -> Iterator[str]:
    """Yield the HTML parts of a table for each prompt, a row for each network."""
    if not written:
        return
    yield "<h2>Continuations</h2>"
    yield (
        '<p class="quiet">Greedy continuations of each prompt by the networks of the first seed, with their perplexity '
        "on test.</p>"
    )
    groups: dict[tuple[str, str], list[Generation]] = {}
    for each in written:
        groups.setdefault((each.panel, each.prompt), []).append(each)
    several = len({panel for panel, _ in groups}) > 1
    for (panel, prompt), rows in groups.items():
        yield f"<h3>{html(f'{panel}: ' if several else '')}{html(_one_line(prompt))}</h3>"
        yield '<div class="scroll"><table><thead><tr><th>method</th><th>sparsity %</th><th>perplexity</th>'
        yield '<th class="text">continuation</th></tr></thead><tbody>'
        for row in rows[:NETWORKS]:
            sparsity = "" if row.sparsity is None else in_points(row.sparsity)
            cells = "".join(f"<td>{html(cell)}</td>" for cell in (row.line, sparsity, row.figure))
            yield f'<tr>{cells}<td class="written">{html(row.text)}</td></tr>'
        yield "</tbody></table></div>"


def _one_line(prompt: str) -> str:
    return " ".join(prompt.split())
