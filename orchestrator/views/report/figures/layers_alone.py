"""Data of the figure of sensitivity: validation figures against the sparsity of a layer that is pruned alone. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.compare.secondary.sensitivity import SensitivityCurve
from orchestrator.core.metrics import Metric
from orchestrator.views.report.figures.figure_data import Plot, Series, title

LOSS = Metric("loss", "", "lower", margin=0.0, format=".3g")


def layers_alone(curves: Sequence[SensitivityCurve]) -> tuple[Plot, ...]:
    """Return two plots for each model and data set: the primary metric and the loss, a line for each curve."""
    panels: dict[tuple[str, str], list[SensitivityCurve]] = {}
    for curve in curves:
        panels.setdefault((curve.model, curve.data), []).append(curve)
    plots = []
    for panel, each in panels.items():
        methods = {curve.method for curve in each}
        labels = [curve.layer if len(methods) == 1 else f"{curve.method}, {curve.layer}" for curve in each]
        for metric, figure in ((each[0].metric, "val"), (LOSS, "loss")):
            series = tuple(_series(label, curve, figure) for label, curve in zip(labels, each, strict=True))
            plots.append(Plot(f"{title(panel)}, {metric.title}", metric, series))
    return tuple(plots)


def _series(label: str, curve: SensitivityCurve, figure: str) -> Series:
    known = [(point.sparsity, found) for point in curve.points if (found := getattr(point, figure)) is not None]
    return Series(
        label,
        tuple(sparsity for sparsity, _ in known),
        tuple(found.mean for _, found in known),
        tuple(found.low for _, found in known),
        tuple(found.high for _, found in known),
    )
