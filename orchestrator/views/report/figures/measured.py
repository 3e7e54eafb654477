"""Data of figures with the metric against latency, bytes, remaining size, or generated tokens in a second. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean
from typing import NamedTuple

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import Deployed
from orchestrator.compare.secondary_figures import DENSE
from orchestrator.compare.statistics import Estimate
from orchestrator.core.metrics import Metric
from orchestrator.views.report.figures.figure_data import FRONT, Panel, Plot, Series, figure_on, lines_of, texts, title

Place = tuple[float, float]
Kind = tuple[str, int, str]
"""Format, batch size and machine."""
LABELS: Mapping[str, str] = {
    "parameters": "remaining parameters (% of dense)",
    "macs": "remaining multiply-accumulates (% of dense)",
    "latency": "milliseconds of a call, measured",
    "bytes": "bytes, deployed",
}
"""Quantity on the x axis -> its label."""


def against_latency(comparison: Comparison) -> tuple[Plot, ...]:
    """Return plots of the primary metric on test against latency, one for each format, batch size and machine."""
    return tuple(
        _plot(comparison, panel, kind, "latency_ms", f"{kind[0]}, batch {kind[1]}", machine)
        for panel in comparison.panels
        for kind, machine in _with_machine(_kinds(comparison, panel))
    )


def against_bytes(comparison: Comparison) -> tuple[Plot, ...]:
    """Return plots of the primary metric on test against the deployed network's bytes, one for each format."""
    return tuple(
        _plot(comparison, panel, kind, "bytes", kind[0], "")
        for panel in comparison.panels
        for kind in {kind[0]: kind for kind in reversed(_kinds(comparison, panel))}.values()
    )


def against_size(comparison: Comparison, of: str) -> tuple[Plot, ...]:
    """Return plots of the primary metric on test against remaining `parameters` or `macs`, counted, in % of dense."""
    plots = []
    for panel in comparison.panels:
        places = {
            line: [
                (100 * left, _test(point))
                for point in points
                if point.test is not None and (left := _left(point, of)) is not None
            ]
            for line, points in lines_of(comparison, panel).items()
        }
        plots.append(_with_front(comparison, panel, title(panel), places, [100.0]))
    return tuple(plots)


def against(comparison: Comparison, of: str) -> tuple[Plot, ...]:
    """Return the plots against one of `LABELS`."""
    if of in ("parameters", "macs"):
        return against_size(comparison, of)
    return against_latency(comparison) if of == "latency" else against_bytes(comparison)


def front(places: Sequence[Place], metric: Metric) -> list[Place]:
    """Return the Pareto front: places that no other place beats in both, in order of x."""
    found: list[Place] = []
    for x, y in sorted(places, key=lambda place: (place[0], -metric.gain(place[1], 0.0))):
        if not found or metric.gain(y, found[-1][1]) > 0:
            found.append((x, y))
    return found


def _kinds(comparison: Comparison, panel: Panel) -> list[Kind]:
    points = (point for line in lines_of(comparison, panel).values() for point in line)
    return list(dict.fromkeys(_kind(each) for point in points for each in point.deployed))


def _kind(each: Deployed) -> Kind:
    return each.format, each.batch_size, each.hardware


def _with_machine(kinds: Sequence[Kind]) -> Iterator[tuple[Kind, str]]:
    """Yield each kind with its machine, empty if the format and batch size were measured on only one."""
    for kind in kinds:
        yield kind, kind[2] if sum(kind[:2] == other[:2] for other in kinds) > 1 else ""


def _plot(comparison: Comparison, panel: Panel, kind: Kind, what: str, words: str, machine: str) -> Plot:
    places: dict[str, list[Place]] = {}
    dense_at: list[float] = []
    dense_test: list[float] = []
    for (*of_panel, line), points in comparison.lines.items():
        if tuple(of_panel) != panel:
            continue
        for point, each in ((p, d) for p in points for d in p.deployed if _kind(d) == kind and p.test is not None):
            achieved = _test(point) if each.test is None else each.test.mean
            places.setdefault(line, []).append((getattr(each, what), achieved))
            dense_at.append(each.dense_ms if what == "latency_ms" else each.dense_bytes)
            dense_test += [] if each.dense_test is None else [each.dense_test]
    name = ", ".join(filter(None, (title(panel), words, machine)))
    return _with_front(comparison, panel, name, places, dense_at, dense_test)


def _with_front(
    comparison: Comparison,
    panel: Panel,
    name: str,
    places: dict[str, list[Place]],
    dense_at: Sequence[float],
    dense_test: Sequence[float] = (),
) -> Plot:
    """Return a plot of these places, with the mean of the dense networks and the Pareto front.

    Args:
        comparison: comparison of the trials
        panel: model and data set
        name: title of the plot
        places: line -> its places
        dense_at: x values of the dense networks; empty: dense is not shown
        dense_test: primary metric of the dense networks in a format that changes outputs; empty: as trained
    """
    dense = [p for p in comparison.dense if (p.model, p.data) == panel and p.test is not None]
    if dense and dense_at:
        places["dense"] = [(fmean(dense_at), fmean(dense_test or map(_test, dense)))]
    metric = next(p.metric for p in (*comparison.dense, *comparison.points) if (p.model, p.data) == panel)
    best = front([place for each in places.values() for place in each], metric)  # includes lines that are not drawn
    drawn = {label: each for label, each in places.items() if label in (*lines_of(comparison, panel), "dense")}
    series = tuple(
        Series(label, tuple(x for x, _ in each), tuple(y for _, y in each))
        for label, each in {**drawn, FRONT: best}.items()
    )
    return Plot(name, metric, series)


def _left(point: Point, of: str) -> float | None:
    return 1 / point.compression if of == "parameters" else point.macs_left


def _test(point: Point) -> float:
    assert point.test is not None
    return point.test.mean


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
