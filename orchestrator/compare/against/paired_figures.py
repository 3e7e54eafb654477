"""Figures of a sweep that can be paired: by point name, figure and seed, with their hardware. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.deployment_points import by_network, hardware_of, measured_figures
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan


class PointName(NamedTuple):
    """Name of a point, the same in every sweep that has the point."""

    model: str
    data: str
    line: str
    sparsity: float
    """Requested sparsity, as `Point.asked_sparsity`."""
    asked_of: str
    """Quantity that the sparsity is a fraction of, as `Point.asked_of`; empty in a baseline that does not record it."""
    round: int

    @property
    def panel(self) -> str:
        """Name of the panel: model and data set."""
        return panel_name(self.model, self.data)


def panel_name(model: str, data: str) -> str:
    """Return the name of a panel: mlp on digits."""
    return f"{model} on {data}"


def is_size(figure: str) -> bool:
    """Whether a figure is a size: counted without noise, so that every seed can be checked; lower is better."""
    return figure == "parameters/remaining" or (figure.startswith("deploy/") and figure.endswith("/bytes"))


def is_speedup(figure: str) -> bool:
    """Whether a figure is a measured speed-up over the dense network; higher is better, on one kind of machine."""
    return figure.startswith("deploy/") and figure.endswith("/speedup")


def is_latency(figure: str) -> bool:
    """Whether a figure is a latency: lower is better; it is not relative to dense, so it drifts with the machine."""
    return figure.startswith("deploy/") and figure.endswith("/latency_ms")


def figures(
    comparison: Comparison, plan: Plan, records: Mapping[str, StageRecord]
) -> dict[PointName, dict[str, dict[int, float]]]:
    """Return figure -> seed -> value for each dense and operating point."""
    rows, measured = {row.stage: row for row in comparison.rows}, by_network(plan, records)
    found: dict[PointName, dict[str, dict[int, float]]] = {}
    for point in (*comparison.dense, *comparison.operating_points):
        of_point = found.setdefault(name_of(point), {})
        for row in (rows[stage] for stage in point.stages):
            own = {primary_figure(point): row.test, "parameters/remaining": float(row.remaining_parameters)}
            for each in (own, *map(measured_figures, measured.get(row.stage, ()))):
                for figure, value in each.items():
                    of_point.setdefault(figure, {})[row.seed] = value
    return found


def name_of(point: Point) -> PointName:
    """Return the name of a point."""
    return PointName(point.model, point.data, point.line, point.asked_sparsity, point.asked_of, point.round)


def primary_figure(point: Point) -> str:
    """Return the name of the figure that points are compared by: the primary metric on test."""
    return f"test/{point.metric.name}"


def is_primary(figure: str, metric: Metric) -> bool:
    """Whether a figure is the primary metric on test, of a network or of its deployed form."""
    primary = f"test/{metric.name}"
    return figure == primary or (figure.startswith("deploy/") and figure.endswith(f"/{primary}"))


def hardware(records: Iterable[StageRecord]) -> tuple[str, ...]:
    """Return the processors on which a sweep ran."""
    return tuple(sorted({record.environment.get("processor", "unknown") for record in records}))


def measured_on(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, tuple[str, ...]]:
    """Return deployment format -> hardware on which latency was measured: processor, threads and runtime."""
    found: dict[str, set[str]] = {}
    for record in chain.from_iterable(by_network(plan, records).values()):
        found.setdefault(record.spec["fields"]["format"], set()).add(hardware_of(record))
    return {name: tuple(sorted(places)) for name, places in sorted(found.items())}
