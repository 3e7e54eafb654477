"""What can be paired of a sweep: its points by name, their figures by seed, and on what these were measured. Pure."""

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
    """What a point is called in every sweep that has it."""

    model: str
    data: str
    line: str
    sparsity: float
    """As `Point.asked_sparsity`."""
    asked_of: str
    """Quantity that the sparsity is a fraction of, as `Point.asked_of`; empty in a baseline that does not say it."""
    round: int

    @property
    def panel(self) -> str:
        """The model and the data set."""
        return panel_name(self.model, self.data)


def panel_name(model: str, data: str) -> str:
    """Return the name of a panel of a comparison: mlp on digits."""
    return f"{model} on {data}"


def is_size(figure: str) -> bool:
    """Say whether a figure is counted, not drawn: less is better, and every seed can be held to it."""
    return figure == "parameters/remaining" or (figure.startswith("deploy/") and figure.endswith("/bytes"))


def is_speedup(figure: str) -> bool:
    """Say whether a figure is measured beside the dense network: more is better, on one kind of machine."""
    return figure.startswith("deploy/") and figure.endswith("/speedup")


def is_latency(figure: str) -> bool:
    """Say whether a figure is measured alone: less is better, and it drifts with the machine."""
    return figure.startswith("deploy/") and figure.endswith("/latency_ms")


def figures(
    comparison: Comparison, plan: Plan, records: Mapping[str, StageRecord]
) -> dict[PointName, dict[str, dict[int, float]]]:
    """Return the figures of the dense networks and the operating points that can be paired: figure -> seed -> value."""
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
    """Return what a point is called."""
    return PointName(point.model, point.data, point.line, point.asked_sparsity, point.asked_of, point.round)


def primary_figure(point: Point) -> str:
    """Return the name of the figure by which a point is compared: on the test split, as in a comparison."""
    return f"test/{point.metric.name}"


def is_primary(figure: str, metric: Metric) -> bool:
    """Say whether a figure is a value of a primary metric, of a network or of it in a format that changes outputs."""
    primary = f"test/{metric.name}"
    return figure == primary or (figure.startswith("deploy/") and figure.endswith(f"/{primary}"))


def hardware(records: Iterable[StageRecord]) -> tuple[str, ...]:
    """Return the processors that a sweep ran on."""
    return tuple(sorted({record.environment.get("processor", "unknown") for record in records}))


def measured_on(plan: Plan, records: Mapping[str, StageRecord]) -> dict[str, tuple[str, ...]]:
    """Return on what latency was measured, by format, each of which has a runtime: processor, threads and runtime."""
    found: dict[str, set[str]] = {}
    for record in chain.from_iterable(by_network(plan, records).values()):
        found.setdefault(record.spec["fields"]["format"], set()).add(hardware_of(record))
    return {name: tuple(sorted(places)) for name, places in sorted(found.items())}
