"""Answers of a search as sentences, and the best networks of a frontier, by loss and by the harness."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.harness_scores import HarnessScore
from orchestrator.compare.secondary_figures import DENSE, WindowDifference
from orchestrator.planning.number_formats import milliseconds, percent, whole_number
from orchestrator.views.report.columns import difference, times
from orchestrator.views.report.tables import NATS


def answer_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the answers of a search; of a frontier also its best networks, by loss and by the harness."""
    search = comparison.search
    yield from (f"Answer: {answer}." for answer in (search.answers if search else ()))
    for panel in comparison.panels if search and search.against else ():
        points = [each for each in comparison.points if each.answer and each.panel == panel]
        lines = Counter(each.line for each in points)
        names = [
            each.line if lines[each.line] == 1 else f"{each.line} at {percent(each.asked_sparsity)}" for each in points
        ]
        scores = [[own for own in comparison.harness if _is_of(own, each)] for each in points]
        if points:
            best, name, own = min(zip(points, names, scores, strict=True), key=lambda each: _loss(each[0]))
            told = "; ".join(_figures(comparison, best, own))
            yield f"Best {panel[0]} on {panel[1]} by {best.metric.title} on validation: {name}: {told}."
        if scored := [(fmean(map(_gain, own)), name) for name, own in zip(names, scores, strict=True) if own]:
            gain, name = max(scored)
            yield (
                f"Best {panel[0]} on {panel[1]} by lm-evaluation-harness, which the search has not seen: {name}, mean "
                f"gain over dense in all its figures {gain:+.4f}."
            )


def _loss(point: Point) -> float:
    val = (point.deployed[0].val if point.deployed else None) or point.val
    return float("inf") if val is None else -point.metric.gain(val.mean, 0.0)


def _gain(score: HarnessScore) -> float:
    return score.metric.gain(score.score.mean, score.dense)


def _is_of(found: HarnessScore | WindowDifference, point: Point) -> bool:
    key = (*point.panel, point.line, point.asked_sparsity)
    return (found.model, found.data, found.line, found.sparsity) == key


def _figures(comparison: Comparison, point: Point, scores: list[HarnessScore]) -> Iterator[str]:
    """Yield the figures of a network, with those intervals that are known."""
    yield f"{whole_number(point.remaining_parameters)} parameters"
    if point.test is not None:
        against = difference(point.difference, point.metric)
        yield f"{point.metric.title} on test {point.metric.said(point.test.mean)}, {against} against dense"
    for window in comparison.windows:
        if window.reference == DENSE and _is_of(window, point):
            yield f"{difference(window.windows, NATS)} nats per token by window of {window.text}"
    for each in point.deployed[:1]:
        yield f"{milliseconds(each.latency_ms)} ms as {each.format}, {times(each.speedup)} as fast as dense"
        if each.token_ms is not None:
            yield f"{milliseconds(each.token_ms)} ms a token, {times(each.token_speedup)} as fast as dense"
    for score in scores:
        against = difference(score.documents or score.difference, score.metric)
        yield f"{score.name} {score.metric.title} {score.metric.said(score.score.mean)}, {against} against dense"
