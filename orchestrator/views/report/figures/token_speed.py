"""Data of figures with the metric against the tokens that a deployed language model generates in a second. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import Deployed
from orchestrator.compare.secondary.window_differences import DENSE
from orchestrator.compare.statistics import Estimate
from orchestrator.views.report.figures.figure_data import Panel, Plot, Series, figure_on, lines_of, texts, title

SECOND = 1000.0
"""A second in milliseconds."""


class _Place(NamedTuple):
    line: str
    rate: Estimate
    figure: Estimate


def token_speed(comparison: Comparison) -> tuple[Plot, ...]:
    """Return plots of the primary metric against tokens a second: one for each text, format, batch size and machine.

    Horizontal intervals are those of the measured speed-up over dense. Vertical ones are those of the difference from
    dense by window of the text, else those over seeds.
    """
    return tuple(_plots(comparison))


def _plots(comparison: Comparison) -> Iterator[Plot]:
    for panel in comparison.panels:
        points = [point for line in lines_of(comparison, panel).values() for point in line]
        deployed = [each for point in points for each in point.deployed if each.token_speedup is not None]
        kinds = dict.fromkeys((each.format, each.batch_size, each.hardware) for each in deployed)
        for form, size, hardware in kinds:
            machine = [hardware] if sum((form, size) == kind[:2] for kind in kinds) > 1 else []
            for text in texts(comparison):
                found = [*_places(comparison, panel, points, (form, size, hardware), text)]
                named = ", ".join([title(panel) + f": {text}" * (text != "test"), form, f"batch {size}", *machine])
                if found:
                    yield Plot(named, points[0].metric, tuple(_series(found)))


def _places(
    comparison: Comparison, panel: Panel, points: list[Point], kind: tuple[str, int, str], text: str
) -> Iterator[_Place]:
    rates: list[float] = []
    for point in points:
        for each in point.deployed:
            if (each.format, each.batch_size, each.hardware) != kind or each.token_speedup is None:
                continue
            rates.append(_dense_rate(each))
            if (figure := _figure(comparison, point, each, text)) is not None:
                yield _Place(point.line, _scaled(each.token_speedup, rates[-1]), figure)
    for point in comparison.dense:
        own = figure_on(point, text) if (point.model, point.data) == panel else None
        if own is not None and rates:
            yield _Place(DENSE, Estimate(len(rates), math.fsum(rates) / len(rates)), own)


def _dense_rate(each: Deployed) -> float:
    """Return the tokens that the dense network generates in a second, in all examples of the batch."""
    assert each.dense_token_ms is not None
    return SECOND * each.batch_size / each.dense_token_ms


def _figure(comparison: Comparison, point: Point, each: Deployed, text: str) -> Estimate | None:
    """Return the metric on a text; with the interval of its difference from dense by window, where there is one."""
    if text == "test" and each.test is not None:
        return each.test
    own = figure_on(point, text)
    if own is None or point.metric.name != "perplexity":
        return own
    for found in comparison.windows:
        place = (found.model, found.data, found.line, found.text, found.reference)
        if place == (*point.line_key, text, DENSE) and found.sparsity == point.asked_sparsity:
            factor = {end: getattr(found.windows, end) for end in ("low", "high")}
            ends = {end: own.mean * math.exp(at - found.windows.mean) for end, at in factor.items() if at is not None}
            return Estimate(own.n, own.mean, own.std, **ends)
    return own


def _scaled(speedup: Estimate, rate: float) -> Estimate:
    ends = {end: None if (at := getattr(speedup, end)) is None else rate * at for end in ("low", "high")}
    return Estimate(speedup.n, rate * speedup.mean, None, **ends)


def _series(places: list[_Place]) -> Iterator[Series]:
    for line, group in groupby(places, key=lambda place: place.line):  # points come line by line
        own = sorted(group, key=lambda place: place.rate.mean)
        yield Series(
            line,
            tuple(each.rate.mean for each in own),
            tuple(each.figure.mean for each in own),
            tuple(each.figure.low for each in own),
            tuple(each.figure.high for each in own),
            left=tuple(each.rate.low for each in own),
            right=tuple(each.rate.high for each in own),
        )
