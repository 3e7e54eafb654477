"""Figures about single layers and entries: layers pruned alone, masks that change, overlap of masks. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING

from orchestrator.compare.comparison import Comparison
from orchestrator.compare.sensitivity import SensitivityCurve
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import logger
from orchestrator.store.finished_stages import MOST_ENTRIES, masks_in
from orchestrator.views.report.figures import by_method
from orchestrator.views.report.figures.figure_data import CURVES, Matrix, Plot, Series, lines_of, title

if TYPE_CHECKING:
    from orchestrator.store.finished_stages import Masks

_LOGGER = logger("orchestrator")
MOST = MOST_ENTRIES
"""Maximum number of mask entries compared in all: one byte each, and more while a mask is read."""

ReadFile = Callable[[str, str], bytes]
"""Stage key and name of a file -> its content."""


def overlap_of(records: Mapping[str, StageRecord], comparison: Comparison, read: ReadFile) -> tuple[Matrix, ...]:
    """Return an overlap matrix for each panel with readable masks of two methods for networks of equal shapes."""
    masks = _masks(records, read, by_method.overlapping(comparison))
    return by_method.overlap(comparison, masks, lambda one, other: _shared(masks[one], masks[other]))


def _masks(records: Mapping[str, StageRecord], read: ReadFile, keys: Iterable[str]) -> Mapping[str, Masks]:
    """Return stage key -> masks; masks that cannot be read or exceed the limit are left out with a warning."""
    readable: dict[str, Masks] = {}
    room, beyond = MOST, 0
    for key in keys:
        entries = records[key].prunable_parameters
        if entries > room:
            beyond += 1
            continue
        room -= entries
        try:
            readable[key] = masks_in(read(key, MASKS), records[key])
        except (OrchestratorError, OSError, ValueError) as error:
            _LOGGER.warning("The overlap of masks is shown without stage %s: %s", key[:12], error)
    if beyond:
        _LOGGER.warning(
            "The overlap of masks is shown without %d of the networks: the figure compares at most %d entries of "
            "masks.",
            beyond,
            MOST,
        )
    return readable


def _shared(one: Masks, other: Masks) -> tuple[float, float] | None:
    """Return the fraction of kept entries that two networks have in common, and by chance; None for unequal shapes.

    common = |A and B| / ((|A| + |B|) / 2)

    The value by chance has equally many kept entries in each tensor.
    """
    if {name: mask.shape for name, mask in one.items()} != {name: mask.shape for name, mask in other.items()}:
        return None
    counts = [(int(mask.sum()), int(other[name].sum()), mask.size) for name, mask in one.items()]
    kept = sum(a + b for a, b, _ in counts) / 2
    both = sum(int((mask & other[name]).sum()) for name, mask in one.items())
    by_chance = sum(a * b / size for a, b, size in counts if size)
    return (both / kept, by_chance / kept) if kept else (1.0, 1.0)


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
