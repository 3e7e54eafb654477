"""Comparison as tables and text: the main table, pairs of methods, windows and continuations of text, and notes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp
from typing import TYPE_CHECKING, TypeVar

from orchestrator.compare.audit.compared_points import unlearned_text
from orchestrator.compare.audit.rule import Finding
from orchestrator.compare.comparison import Comparison, Level, Point, StoppedPoint
from orchestrator.compare.harness_scores import HarnessScore
from orchestrator.compare.round_columns import EXPERTS, in_words
from orchestrator.compare.secondary_figures import DENSE, WindowDifference
from orchestrator.compare.statistics import LEVEL, Estimate, has_spread, paired_difference, t_quantile
from orchestrator.core.events import SweepInfo
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import html, shown
from orchestrator.core.specs import Plan
from orchestrator.planning.forecast import afterwards
from orchestrator.planning.number_formats import counted, duration, first_few, in_points, percent, ratio, whole_number
from orchestrator.views.report.columns import (
    CONSIDERED,
    COST,
    MATCH,
    NARROW,
    NO_MACS,
    REACHED,
    SEEDS,
    Column,
    blocks,
    difference,
    narrow,
    reached_another,
)
from orchestrator.views.report.table import Row, Table

if TYPE_CHECKING:
    from rich.console import Console

Paired = TypeVar("Paired", WindowDifference, HarnessScore)
PAIRS_ON_PAGE = 200
"""Maximum number of pairs on the page."""
PAIRS_LISTED = 20
"""Maximum number of pairs in the terminal."""
PAIRS_NOTE = (
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
    for pair in pairs[:PAIRS_LISTED]:
        panel = f" ({pair.best.model} on {pair.best.data})" if len(comparison.panels) > 1 else ""
        yield (
            f"  at {percent(pair.best.asked_sparsity)}{panel}: {pair.best.line} - {pair.other.line}: "
            f"{difference(pair.difference, pair.best.metric)}, {pair.verdict}"
        )
    if len(pairs) > PAIRS_LISTED:
        yield f"  and {whole_number(len(pairs) - PAIRS_LISTED)} more pairs, in the report"


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
                f"{percent(pair.best.asked_sparsity)} of {pair.best.compared_by}",
                difference(pair.difference, pair.best.metric),
                str(pair.difference.n),
                pair.verdict,
            ),
        )
        for pair in pairs
    ]
    headings = ("minus", "asked", "difference [95% interval]", "seeds", "shown")
    yield f'<h2>The best method against each other</h2><p class="quiet">{html(PAIRS_NOTE)}</p>'
    yield from Table(headings, rows, label="best at its sparsity").html(PAIRS_ON_PAGE)


NATS = Metric("cross_entropy", "nats", "lower", margin=0.0, format=".4f")
LINES = 12
"""Maximum number of differences by window in the terminal."""
NOTE = (
    "By window: the cross-entropy of a method minus that of another on the same windows of held-out text, in nats per "
    "token, mean over seeds, with the interval over windows; perplexities differ by the factor exp(difference). Over "
    "seeds: the standard deviation of the differences, from draws of calibration and training. Both prune the same "
    "dense network."
)


def window_table(found: Iterable[WindowDifference]) -> Table:
    """Return the table of differences between networks by window of text."""
    rows = [
        Row(
            f"{each.line} - {each.reference}{'' if each.text == 'test' else f' on {each.text}'}",
            (
                in_points(each.achieved),
                difference(each.windows, NATS),
                ratio(exp(min(each.windows.mean, 700.0))),
                whole_number(each.windows.n),
                (f"± {each.draws.std:.4f} " if each.draws.std is not None else "") + f"({each.draws.n})",
            ),
        )
        for each in found
    ]
    headings = ("sparsity %", "difference [95% interval]", "perplexity", "windows", "over seeds")
    return Table(headings, rows, (10, 26, 11, 8, 12), "methods")


def of_panel(found: Iterable[Paired], title: str) -> list[Paired]:
    """Return the differences of a panel."""
    return [each for each in found if f"{each.model} on {each.data}" == title]


HARNESS_NOTE = (
    "By document: a network's score minus that of its own dense network on the same documents, mean over seeds, with "
    "the interval over documents. It is the uncertainty of the documents, not that of other trainings, which the "
    "standard deviation over seeds shows. –: the figure is not a mean over documents."
)


def harness_table(found: Iterable[HarnessScore]) -> Table:
    """Return the table of scores on tasks of lm-evaluation-harness."""
    rows = [
        Row(
            f"{each.name} {each.metric.title} ({each.metric.better} is better), {each.line}",
            (
                in_points(each.achieved),
                each.metric.written(each.score.mean),
                each.metric.written(each.dense),
                difference(each.documents, each.metric),
                "–" if each.documents is None else whole_number(each.documents.n),
                (f"± {each.difference.std:.4f} " if each.difference.std is not None else "") + f"({each.score.n})",
            ),
        )
        for each in found
    ]
    headings = ("sparsity %", "score", "dense", "difference [95% interval]", "documents", "over seeds")
    return Table(headings, rows, (10, 8, 8, 26, 9, 12), "tasks")


def generations(records: Mapping[str, StageRecord], comparison: Comparison) -> dict[str, Table]:
    """Return panel and prompt -> table of the continuations by the networks of each point's first seed."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for point in (*comparison.dense, *comparison.operating_points):
        record = records[point.stages[0]]
        sparsity = in_points(point.sparsity) if point.round else ""
        for each in record.typed.generations:
            place = f"{point.model} on {point.data}", " ".join(each.prompt.split())
            cells = (sparsity, point.metric.written(record.figure("test")), each.text)
            rows.setdefault(place, []).append(Row(point.line, cells))
    several = len({panel for panel, _ in rows}) > 1
    headings = ("sparsity %", "perplexity", "continuation")
    return {
        f"{panel}: {prompt}" if several else prompt: Table(headings, each, prose=True)
        for (panel, prompt), each in rows.items()
    }


def sections(comparison: Comparison) -> Iterator[tuple[str, list[Point]]]:
    """Yield (title, points to show) for each panel: dense first, then line by line."""
    for model, data in comparison.panels:
        shown = [point for point in comparison.dense if (point.model, point.data) == (model, data)]
        shown += [point for point in comparison.operating_points if (point.model, point.data) == (model, data)]
        yield f"{model} on {data}", shown


def point_table(shown: Sequence[Column], points: Sequence[Point], stopped: Sequence[StoppedPoint] = ()) -> Table:
    """Return the table of these columns.

    Args:
        shown: columns
        points: points, line by line
        stopped: candidates that a search ruled out within their training, which have no figures
    """
    metric = points[0].metric
    rows = [
        Row(point.line, [column.cell(point) for column in shown], point.best_on_all and NARROW[1] in shown)
        for point in points
    ]
    for each in stopped:
        cells = {NARROW[0]: in_points(each.sparsity or 0.0), MATCH: "stopped", SEEDS: f"0 of {each.seeds}"}
        lines = [row.label for row in rows]
        place = len(lines) - lines[::-1].index(each.line_key[2]) if each.line_key[2] in lines else len(lines)
        rows.insert(place, Row(each.line_key[2], [cells.get(column, "") for column in shown]))
    headings, hints = [column.heading(metric) for column in shown], [column.hint for column in shown]
    return Table(headings, rows, [column.width for column in shown], hints=hints)


def ruled_out(comparison: Comparison, title: str) -> list[StoppedPoint]:
    """Return the candidates of a panel that a search ruled out within their training, the least sparse first."""
    found = [
        each for each in (comparison.search.points if comparison.search else ()) if each.begun and not each.finished
    ]
    here = [each for each in found if f"{each.line_key[0]} on {each.line_key[1]}" == title]
    return sorted(here, key=lambda each: each.sparsity or 0.0)


def text_table(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the table, panel by panel; 79 characters wide unless cells are long."""
    for title, points in sections(comparison):
        for suffix, columns, here in blocks(comparison, points):
            yield title + suffix
            yield from point_table(columns, here, [] if suffix else ruled_out(comparison, title)).text("dense")
        windows = of_panel(comparison.windows, title)
        if windows := [each for each in windows if each.reference != DENSE] or windows:
            yield f"{title}: cross-entropy by held-out window, nats per token"
            yield from window_table(windows[:LINES]).text()
            if len(windows) > LINES:
                yield f"{whole_number(len(windows) - LINES)} more differences are in windows.csv of the report."
            yield NOTE
        if scores := of_panel(comparison.harness, title):
            yield f"{title}: lm-evaluation-harness, against dense by document"
            yield from harness_table(scores[:LINES]).text()
            if len(scores) > LINES:
                yield f"{whole_number(len(scores) - LINES)} more scores are in harness.csv of the report."
            yield HARNESS_NOTE
        yield ""


FAILURES_LISTED, LINES_LISTED = 10, 40


def match_note(comparison: Comparison) -> str:
    """Explain the verdicts on matching."""
    if comparison.search is not None and comparison.search.tests and comparison.search.ended:
        return (
            "match: answer: a network of the search's answer, which the search tested on validation with seeds that it "
            "had not explored; its other seeds were not needed. –: not tested, for a second test on the test split "
            "would be a second answer: an interval above that lies within the margin is none."
        )
    return (
        f"match: {' or '.join(metric.loss for metric in comparison.metrics)} against dense is ruled out "
        "(one-sided 97.5% limit of the paired difference), tested along each line from the least sparse point up to "
        "its first no; –: not tested; untested: a test needs two or more seeds that differ."
    )


def two_seeds_note(estimates: Iterable[Estimate | None]) -> Iterator[str]:
    """Yield a note on wide intervals if an estimate has two seeds."""
    if any(each is not None and each.n == 2 and has_spread(each) for each in estimates):
        two, three, five = (t_quantile(LEVEL, seeds - 1) for seeds in (2, 3, 5))
        yield (
            f"2 seeds: t = {two:.1f}. Intervals from two seeds extend {two:.1f} standard errors on either side of the "
            f"mean, from three {three:.1f}, from five {five:.1f}."
        )


def print_comparison(comparison: Comparison, console: Console, *, failures: bool = True) -> None:
    """Print the table, the largest matching sparsities, the cost and, with `failures`, the failed trials."""
    for line in text_table(comparison):
        print_line(console, line, "bold" if "*" in line or not line.startswith(" ") else "")
    for line in (*notes(comparison), *(failure_notes(comparison) if failures else ())):
        print_line(console, line)


def print_audit(findings: Sequence[Finding], console: Console, whole: str = "") -> None:
    """Print the audit's counts, and each failed rule with its reason, as `audit_notes`."""
    for line in audit_notes(findings, whole):
        print_line(console, line)


def print_forecast(info: SweepInfo, plan: Plan, records: Mapping[str, StageRecord], console: Console) -> None:
    """Print the estimated and the actual time of the last run, if it had an estimate."""
    if info.forecast is not None:
        print_line(console, afterwards(info.forecast, plan, records))


def print_line(console: Console, line: str, style: str = "") -> None:
    """Print a line, made safe to display."""
    from rich.text import Text

    console.print(Text(shown(line), style=style), soft_wrap=True)


def notes(comparison: Comparison, *, pairs: bool = True) -> Iterator[str]:
    """Yield the notes below the table, with the `pairs` of methods; none if the comparison has no points."""
    if not comparison.points:
        return
    reached = any(map(reached_another, comparison.operating_points))
    rivals = "at this requested sparsity" if reached else "at this sparsity"
    best = f" *: the best mean {rivals}{_on_its_text(comparison)}." if any(p.best for p in comparison.points) else ""
    names = " or ".join(f"{metric.title} ({metric.better} is better)" for metric in comparison.metrics)
    columns = narrow(comparison, comparison.points)
    extra = "".join(f" {each.name}: {each.hint}." for each in (REACHED, CONSIDERED, COST) if each in columns)
    odd = f" {NO_MACS}." if any(point.speedup is None for point in comparison.points) else ""
    points = "percentage points, " if any(metric.scale != 1 for metric in comparison.metrics) else ""
    sparsity = " asked: the requested sparsity; sparsity: the achieved one, of the prunable weights." if reached else ""
    yield (
        f"Test {names}: mean ± standard deviation over seeds, of the model selected on validation.{best}{sparsity} "
        f"vs dense: {points}paired by seed. size, MACs: dense / remaining.{odd}{extra}"
    )
    for dense in comparison.unlearned:
        yield f"The dense network has hardly learned its task: {unlearned_text(dense)}; train it longer."
    yield match_note(comparison)
    yield from search_notes(comparison)
    yield from pair_lines(comparison) if pairs else ()
    yield from experts_note(comparison)
    yield from speedup_note(comparison)
    yield from two_seeds_note(point.test for point in (*comparison.dense, *comparison.operating_points))
    largest = comparison.largest_matching
    for key in islice(comparison.lines, LINES_LISTED):
        model, data, line = key
        shown = "not known, because a test needs two or more seeds that differ" if key not in largest else "none"
        if key not in largest and comparison.search is not None:
            shown = "not tested on the test split, because a search has chosen the networks that ran"
        if point := largest.get(key):
            shown = f"{percent(point.sparsity)}, {ratio(point.compression)} smaller"
        panel = f" ({model} on {data})" if len(comparison.panels) > 1 else ""
        if comparison.search is None or not comparison.search.answers:
            yield f"Largest matching sparsity of {line}{panel}: {shown}"
        sparsest = max(comparison.lines[key], key=lambda point: point.sparsity)
        if sparsest.harmed:
            shown = ", ".join(f"{each.label} (-{in_points(each.loss)})" for each in sparsest.harmed)
            yield f"Classes that {line}{panel} at {percent(sparsest.sparsity)} harms most, in points: {shown}"
    if (more := len(comparison.lines) - LINES_LISTED) > 0:
        yield f"{whole_number(more)} more lines are in summary.csv of the report."
    cost = comparison.cost
    if cost.unshared_steps > cost.steps:
        yield (
            f"Training took {whole_number(cost.steps)} steps and {duration(cost.seconds)} of work; without shared "
            f"stages it would have taken {whole_number(cost.unshared_steps)} steps and "
            f"{duration(cost.unshared_seconds)}."
        )
    yield from warning_notes(comparison)


def warning_notes(comparison: Comparison) -> Iterator[str]:
    """Yield the warnings of finished stages, each with the stages that have it."""
    for text, (first, *others) in islice(comparison.warnings.items(), LINES_LISTED):
        yield f"Warning of {first}{f' and {len(others)} more' if others else ''}: {text}."
    if (more := len(comparison.warnings) - LINES_LISTED) > 0:
        yield f"{whole_number(more)} more warnings are in comparison.json of the report."


def experts_note(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of whole experts that remove another fraction of weights than asked; other lines do not."""
    apart = [
        p for p in comparison.operating_points if in_words(p.budget, p.unit) == EXPERTS and p.asked_of == p.compared_by
    ]
    if apart and len(apart) < len(comparison.operating_points):
        removed = first_few(
            [f"{p.line} at {percent(p.asked_sparsity)} removes {percent(p.sparsity)}" for p in apart], 3
        )
        yield (
            f"Experts go whole, so the removed fraction of the prunable weights is another than asked: {removed}. They "
            "are not compared with pruned entries; ask for a whole number of experts of each layer, and set "
            "prune.include=['*.experts.*']."
        )


def speedup_note(comparison: Comparison) -> Iterator[str]:
    """Yield the dense network that each format's measured speed-up is over, if formats differ in it."""
    found: dict[str, set[str]] = {}
    for each in (each for point in comparison.points for each in point.deployed):
        found.setdefault(each.format, set()).update(each.dense_runtimes)
    if any(found.values()) and not all(found.values()):
        over = [
            f"{name} over dense in {f'its fastest runtime here ({chr(44).join(sorted(of))})' if of else 'that format'}"
            for name, of in found.items()
        ]
        both = any(each.speedup_pytorch for point in comparison.points for each in point.deployed)
        yield (
            f"Measured speed-ups: {'; '.join(over)}. Compare them only within a format"
            + ("; of PyTorch: over dense in PyTorch, whatever the format." if both else ".")
        )


def _on_its_text(comparison: Comparison) -> str:
    """Say that each test set has its own winner, if there are several; name the levels where they differ."""
    if not any(point.further for point in comparison.points):
        return ""
    split = any(point.best and not point.best_on_all for point in comparison.points)
    return " on this text; " + ("the texts differ in the best method" if split else "the texts agree")


def search_notes(comparison: Comparison) -> Iterator[str]:
    """Yield how a search ended, and the points that it did not run for all seeds, with the reasons."""
    search = comparison.search
    if search is None:
        return
    tests = f", {counted(search.tests, 'test')} among them" if search.tests else ""
    state = "has ended" if search.ended else "has not ended"
    yield f"The search {state} after {counted(search.looks, 'look')} at validation figures{tests}."
    by_reason: dict[tuple[str, str], list[str]] = {}
    for point in search.points:
        at = "the end" if point.sparsity is None else percent(point.sparsity)
        seeds = f" ({point.finished} of {point.seeds} seeds)" if point.finished else ""
        by_reason.setdefault((point.line_key[2], point.reason), []).append(f"{at}{seeds}")
    for (line, reason), places in islice(by_reason.items(), LINES_LISTED):
        yield f"Stopped, and so not tested: {line} at {', '.join(places)}: {reason}."


def audit_notes(findings: Sequence[Finding], whole: str = "") -> Iterator[str]:
    """Yield the audit's counts, and a line for each failed rule.

    Args:
        findings: results of the audit
        whole: command that prints the whole audit; if given, rules that only a sweep of several trials can pass are
            counted alone
    """
    failed = [finding for finding in findings if finding.verdict == "fail"]
    passed = sum(finding.verdict == "pass" for finding in findings)
    idle = len(findings) - passed - len(failed)
    yield f"Audit: {passed} of {len(findings)} rules pass, {len(failed)} fail" + (
        f", {idle} do not apply." if idle else "."
    )
    for finding in (each for each in failed if not (whole and each.of_many)):
        yield f"  {finding.rule}: {finding.reason}"
    if whole and (left := sum(each.of_many for each in failed)):
        yield f"  {counted(left, 'rule')} about comparisons can pass with more trials only; `{whole}` lists all."


def failure_notes(comparison: Comparison) -> Iterator[str]:
    """Yield the trials that did not finish, with the reasons."""
    missing = [name for name, status in comparison.trials.items() if status not in ("finished", "stopped")]
    if not missing:
        return
    failed = [name for name in missing if comparison.trials[name] == "failed"]
    of_them = f", {len(failed)} of them failed" if failed else ""
    yield f"{len(missing)} of {len(comparison.trials)} trials did not finish{of_them}:"
    reasons: dict[str, list[str]] = {}
    for name in failed or missing:
        lacking = "trained, not measured" if comparison.trials[name] == "unmeasured" else "not run"
        reasons.setdefault(comparison.failures.get(name, lacking), []).append(name)
    for reason, (first, *others) in islice(reasons.items(), FAILURES_LISTED):
        yield f"  {first}{f' and {len(others)} more' if others else ''}: {reason}"
    if len(reasons) > FAILURES_LISTED:
        yield f"  and {len(reasons) - FAILURES_LISTED} more reasons"
