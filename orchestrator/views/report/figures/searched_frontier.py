"""Data of the figure with the frontier that a search found, on validation figures. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.statistics import Estimate
from orchestrator.views.report.figures.figure_data import FRONT, Panel, Plot, Series, lines_of, title
from orchestrator.views.report.figures.measured import LABELS

STOPPED = "stopped by the search"
"""Label of the series of networks without all their seeds."""
X_LABELS = {**LABELS, "training_macs": "multiply-accumulates of training, from initialisation"}
"""Quantity on the x axis -> its label."""
Place = tuple[float, Estimate]


def frontier(comparison: Comparison) -> tuple[Plot, ...]:
    """Return a plot of the primary metric on validation for each panel with a frontier and each of its quantities."""
    search = comparison.search
    if search is None:
        return ()
    found, several = set(search.networks), len(search.against) > 1
    return tuple(
        _plot(comparison, panel, against, found, f"{title(panel)}, {against}" if several else title(panel))
        for panel in comparison.panels
        for against in search.against
        if any(found.issuperset(point.stages) for point in _points(comparison, panel))
    )


def _plot(comparison: Comparison, panel: Panel, against: str, found: set[str], name: str) -> Plot:
    lines = {
        label: _places((point for point in points if not point.stopped), against)
        for label, points in lines_of(comparison, panel).items()
    }
    points = _points(comparison, panel)
    lines[STOPPED] = _places((point for point in points if point.stopped), against)
    front = _places((point for point in points if found.issuperset(point.stages) and not point.stopped), against)
    series = [_series(label, places) for label, places in {**lines, FRONT: front}.items() if places]
    return Plot(name, points[0].metric, tuple(series), x_label=X_LABELS[against])


def _points(comparison: Comparison, panel: Panel) -> list[Point]:
    return [point for point in comparison.operating_points if (point.model, point.data) == panel]


def _places(points: Iterable[Point], against: str) -> list[Place]:
    """Return the known places of points, in order of the quantity."""
    known = ((_quantity(point, against), _value(point, against)) for point in points)
    return sorted([(x, y) for x, y in known if x is not None and y is not None], key=lambda place: place[0])


def _quantity(point: Point, against: str) -> float | None:
    """Return a quantity as the figure shows it; None if it is not known."""
    if against == "training_macs":
        return point.total_training_macs
    if against in ("parameters", "macs"):
        left = 1 / point.compression if against == "parameters" else point.macs_left
        return None if left is None else 100 * left
    first = point.deployed[0] if point.deployed else None
    return None if first is None else first.latency_ms if against == "latency" else first.bytes


def _value(point: Point, against: str) -> Estimate | None:
    """Return the metric on validation, in the deployed format if it changes outputs and is measured."""
    in_format = point.deployed[0].val if point.deployed and against in ("latency", "bytes") else None
    return in_format or point.val


def _series(label: str, places: list[Place]) -> Series:
    shown = [] if label == FRONT else [value for _, value in places]
    return Series(
        label,
        tuple(x for x, _ in places),
        tuple(value.mean for _, value in places),
        tuple(value.low for value in shown),
        tuple(value.high for value in shown),
    )
