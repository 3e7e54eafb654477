"""Data of figures that compare methods' masks at one sparsity: densities by layer, and overlap of masks.

Pure; `orchestrator.views.report.figures.drawing` draws them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.planning.number_formats import percent
from orchestrator.views.report.figures.figure_data import Matrix, Panel, Series, lines_of, mean_of_known, title

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


def densities(records: Mapping[str, StageRecord], comparison: Comparison, least: int = 2) -> tuple[Profile, ...]:
    """Return the density of each tensor by method at one sparsity, mean over seeds.

    Args:
        records: stage key -> record
        comparison: comparison of the trials
        least: minimum number of methods of a panel to show
    """
    profiles = []
    for panel in comparison.panels:
        level, points = _at_one_sparsity(comparison, panel)
        tensors = {label: [records[key].tensor_sparsity for key in point.stages] for label, point in points.items()}
        layers = tuple(dict.fromkeys(name for seeds in tensors.values() for each in seeds for name in each))
        series = []
        for label, seeds in tensors.items():
            kept = {index: mean_of_known(each.get(name) for each in seeds) for index, name in enumerate(layers)}
            known = {float(index): 1 - value for index, value in kept.items() if value is not None}
            series.append(Series(label, tuple(known), tuple(known.values())))
        if len(series) >= least:
            profiles.append(Profile(f"{title(panel)}, {level}", layers, tuple(series)))
    return tuple(profiles)


def layer_errors(records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Profile, ...]:
    """Return the error of each layer pruned with calibration data by method at one sparsity, mean over seeds."""
    profiles = []
    for panel in comparison.panels:
        level, points = _at_one_sparsity(comparison, panel)
        errors = {
            label: [{name: each["error"] for name, each in records[key].layers.items()} for key in point.stages]
            for label, point in points.items()
        }
        layers = tuple(dict.fromkeys(name for seeds in errors.values() for each in seeds for name in each))
        series = []
        for label, seeds in errors.items():
            means = {index: mean_of_known(each.get(name) for each in seeds) for index, name in enumerate(layers)}
            known = {float(index): value for index, value in means.items() if value is not None}
            series += [Series(label, tuple(known), tuple(known.values()))] if known else []
        if series:
            profiles.append(Profile(f"{title(panel)}, {level}", layers, tuple(series)))
    return tuple(profiles)


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
