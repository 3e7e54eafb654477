"""Data of figures that compare methods' masks at one sparsity: densities by layer, and overlap of masks.

Pure; `orchestrator.views.report.figures.drawing` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.planning.number_formats import percent
from orchestrator.views.report.figures.figure_data import (
    Matrix,
    Panel,
    Series,
    groupings,
    lines_of,
    mean_of_known,
    pooled,
    title,
)

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
