"""Data of the figure of masks that change: overlap with the first masks, and explored entries, step by step. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from orchestrator.compare.comparison import Comparison
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.views.report.figures.figure_data import CURVES, Plot, Series, lines_of, title

SHARE = Metric("entries", "%", "higher", margin=0.01, format=".2%")
"""Quantity on the y axis."""
SHARES = {"first_overlap": "kept from the first masks", "explored": "explored"}
"""Field of an update -> its name in the legend."""


def mask_history(records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Plot, ...]:
    """Return `SHARES` against the step of the last round's training, mean over seeds: two series a line.

    A line is shown at its sparsest point; lines whose masks do not change are left out.
    """
    plots = []
    for panel in comparison.panels:
        sparsest = {
            label: max(points, key=lambda point: point.sparsity)
            for label, points in lines_of(comparison, panel).items()
        }
        seeds = {label: [records[key] for key in point.stages] for label, point in sparsest.items()}
        changing = {label: each for label, each in seeds.items() if all(record.mask_updates for record in each)}
        series = [share for label, each in changing.items() for share in _shares(label, each)]
        if series:
            plots.append(Plot(title(panel), SHARE, tuple(series[: 2 * CURVES])))
    return tuple(plots)


def _shares(label: str, seeds: Sequence[StageRecord]) -> list[Series]:
    """Return a series for each of `SHARES`, mean over seeds at the steps that all of them have."""
    updates = [{update["step"]: update for update in record.mask_updates} for record in seeds]
    steps = sorted(set.intersection(*map(set, updates)))
    ends = (0, len(steps) - 1) if steps else ()
    return [
        Series(
            f"{label}, {words}",
            tuple(map(float, steps)),
            tuple(fmean(each[step][name] for each in updates) for step in steps),
            marks=ends,
        )
        for name, words in SHARES.items()
    ]
