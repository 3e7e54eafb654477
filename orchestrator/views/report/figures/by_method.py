"""Data of figures that compare methods: densities by layer and overlap of masks, and the frontier that a search found.

Pure; `orchestrator.views.report.figures.drawing` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.statistics import Estimate
from orchestrator.core.records import StageRecord
from orchestrator.planning.number_formats import percent
from orchestrator.views.report.figures.figure_data import (
    FRONT,
    Matrix,
    Panel,
    Plot,
    Series,
    groupings,
    lines_of,
    mean_of_known,
    pooled,
    title,
)
from orchestrator.views.report.figures.measured import LABELS

METHODS, SEEDS = 20, 3
"""Maximum number of lines shown, and of seeds compared for each line."""

Shared = Callable[[str, str], tuple[float, float] | None]
"""Two stages -> fraction of kept entries that both have in common, and its value by chance."""


@dataclass(frozen=True)
class Profile:
    """Densities in [0, 1] of a network's layers, in order, with one series for each method."""

    title: str
    layers: tuple[str, ...]
    series: tuple[Series, ...]


def densities(
    records: Mapping[str, StageRecord], comparison: Comparison, least: int = 2, *, grouped: bool = False
) -> tuple[Profile, ...]:
    """Return the density of each tensor by method at one sparsity, mean over seeds.

    Args:
        records: stage key -> record
        comparison: comparison of the trials
        least: minimum number of methods of a panel to show
        grouped: more than MOST_LAYERS tensors are shown by block and by role
    """

    def density(record: StageRecord) -> dict[str, float]:
        return {name: 1 - sparsity for name, sparsity in record.tensor_sparsity.items()}

    found = _profiles(records, comparison, density, grouped=grouped, weighted=True)
    return tuple(profile for profile in found if len(profile.series) >= least)


def layer_errors(
    records: Mapping[str, StageRecord], comparison: Comparison, *, grouped: bool = False
) -> tuple[Profile, ...]:
    """Return the error of each layer pruned with calibration data by method at one sparsity, mean over seeds."""

    def error(record: StageRecord) -> dict[str, float]:
        return {name: each["error"] for name, each in record.layers.items()}

    return tuple(_profiles(records, comparison, error, grouped=grouped))


def _profiles(
    records: Mapping[str, StageRecord],
    comparison: Comparison,
    values: Callable[[StageRecord], Mapping[str, float]],
    *,
    grouped: bool,
    weighted: bool = False,
) -> Iterator[Profile]:
    """Yield a profile for each panel and grouping of layers; lines without values are left out."""
    for panel in comparison.panels:
        level, points = _at_one_sparsity(comparison, panel)
        seeds = {label: [records[key] for key in point.stages] for label, point in points.items()}
        layers = list(dict.fromkeys(name for each in seeds.values() for record in each for name in values(record)))
        for suffix, group in groupings(layers, grouped).items():
            names, series = tuple(dict.fromkeys(map(group, layers))), []
            for label, each in seeds.items():
                own = [pooled(values(record), group, record.tensor_sizes if weighted else {}) for record in each]
                means = {float(index): mean_of_known(one.get(name) for one in own) for index, name in enumerate(names)}
                known = {index: value for index, value in means.items() if value is not None}
                series += [Series(label, tuple(known), tuple(known.values()))] if known else []
            if series:
                yield Profile(f"{title(panel)}, {level}{suffix}", names, tuple(series))


def overlapping(comparison: Comparison) -> tuple[str, ...]:
    """Return the keys of the stages whose masks `overlap` compares, from panels with two or more methods."""
    chosen = [_at_one_sparsity(comparison, panel)[1].values() for panel in comparison.panels]
    return tuple(key for points in chosen if len(points) > 1 for point in points for key in point.stages[:SEEDS])


def overlap(comparison: Comparison, readable: Container[str], shared: Shared) -> tuple[Matrix, ...]:
    """Return the fraction of kept entries that two methods have in common at one seed, mean over seeds, and by chance.

    The diagonal compares two seeds of one method. Stages that are not `readable` are left out.
    """
    matrices = []
    for panel in comparison.panels:
        level, points = _at_one_sparsity(comparison, panel)
        stages = {
            label: {seed: key for seed, key in zip(p.seeds[:SEEDS], p.stages[:SEEDS], strict=True) if key in readable}
            for label, p in points.items()
        }
        labels = tuple(label for label, seeds in stages.items() if seeds)
        found = {(a, b): _shared(stages[a], stages[b], shared) for i, a in enumerate(labels) for b in labels[: i + 1]}
        cells = [[found.get((a, b)) or found.get((b, a)) for b in labels] for a in labels]
        if any(found[pair] for pair in found if pair[0] != pair[1]):
            values, chance = (tuple(tuple(cell and cell[of] for cell in row) for row in cells) for of in (0, 1))
            matrices.append(Matrix(f"{title(panel)}, {level}", labels, labels, values, chance))
    return tuple(matrices)


def _shared(one: Mapping[int, str], other: Mapping[int, str], shared: Shared) -> tuple[float, float] | None:
    pairs: Iterable[tuple[str, str]] = ((one[seed], other[seed]) for seed in one if seed in other)
    if one is other:
        pairs = combinations(one.values(), 2)
    found = [each for each in (shared(*pair) for pair in pairs) if each is not None]
    return (fmean(each[0] for each in found), fmean(each[1] for each in found)) if found else None


def _at_one_sparsity(comparison: Comparison, panel: Panel) -> tuple[str, dict[str, Point]]:
    """Return the requested sparsity that most lines of a panel share, the largest if tied, and its points by line."""
    levels: dict[tuple[str, float], dict[str, Point]] = {}
    for label, points in lines_of(comparison, panel).items():
        for point in points:
            levels.setdefault((point.asked_of, round(point.asked_sparsity, 2)), {})[label] = point
    if not levels:
        return "", {}
    level = max(levels, key=lambda level: (min(len(levels[level]), METHODS), level[1]))
    asked_of, sparsity = level
    found = dict(list(levels[level].items())[:METHODS])
    return (
        f"{percent(sparsity, 0)} sparse" if asked_of == WEIGHTS else f"asked: {percent(sparsity, 0)} of {asked_of}",
        found,
    )


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
