"""Plain data of figures about layers: sparsities, errors, layers pruned alone, masks that change, their overlap."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import TYPE_CHECKING

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.round_columns import WEIGHTS
from orchestrator.compare.sensitivity import SensitivityCurve
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import logger
from orchestrator.planning.number_formats import percent
from orchestrator.store.finished_stages import MOST_ENTRIES, masks_in
from orchestrator.views.report.figures.figure_data import CURVES, Panel, Plot, Series, panels, series

if TYPE_CHECKING:
    from orchestrator.store.finished_stages import Masks

_LOGGER = logger("orchestrator")
MOST = MOST_ENTRIES
"""Maximum number of mask entries compared in all: one byte each, and more while a mask is read."""
HEAT_ROWS, MOST_LAYERS, METHODS, SEEDS = 40, 40, 20, 3
"""Maximum number of operating points in a heat map, of layers in a figure, of lines at one sparsity, and of seeds
compared for each line."""
ROUNDING = 0.01
"""Difference of densities up to which layers count as equally dense."""
LOSS = Metric("loss", "", "lower", margin=0.0, format=".3g")
SHARE = Metric("entries", "%", "higher", margin=0.01, format=".2%")
SHARES = {"first_overlap": "kept from the first masks", "explored": "explored"}
"""Field of an update -> its name in the legend."""

Records = Mapping[str, StageRecord]
ReadFile = Callable[[str, str], bytes]
"""Stage key and name of a file -> its content."""
Shared = Callable[[str, str], tuple[float, float] | None]
"""Two stages -> fraction of kept entries that both have in common, and its value by chance."""


@dataclass(frozen=True)
class Matrix:
    """Grid of values in [0, 1]; None for a missing value."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    chance: tuple[tuple[float | None, ...], ...] = ()
    """Value of each cell by chance, if known."""


@dataclass(frozen=True)
class Profile:
    """Values of a network's layers, in order, with one series for each method."""

    title: str
    layers: tuple[str, ...]
    series: tuple[Series, ...]


def layer_sparsity(records: Records, comparison: Comparison, *, grouped: bool = False) -> tuple[Matrix, ...]:
    """Return the sparsity of each tensor at each operating point, mean over seeds.

    Args:
        records: stage key -> record
        comparison: comparison of the trials
        grouped: more than MOST_LAYERS tensors are shown in two matrices: by block, and by role
    """
    matrices = []
    for panel in panels(comparison):
        shown = panel.points[:: -(-len(panel.points) // HEAT_ROWS) or 1]
        rows = tuple(f"{point.line} {percent(point.sparsity)}" for point in shown)
        seeds = [[records[key] for key in point.stages] for point in shown]
        for suffix, columns, found in _by_layer(seeds, lambda record: record.tensor_sparsity, grouped=grouped):
            values = tuple(tuple(layers.get(name) for name in columns) for layers in found)
            matrices.append(Matrix(panel.title + suffix, rows, columns, values))
    return tuple(matrices)


def _by_layer(
    points: Sequence[Sequence[StageRecord]],
    values: Callable[[StageRecord], Mapping[str, float]],
    *,
    grouped: bool,
    weighted: bool = True,
) -> Iterator[tuple[str, tuple[str, ...], list[dict[str, float]]]]:
    """Yield for each grouping of layers the suffix of a title, the groups, and group -> value at each point.

    Args:
        points: records of each point's seeds, whose mean is taken
        values: record -> values by layer
        grouped: see `groupings`
        weighted: weigh the layers of a group by their sizes
    """
    layers = list(dict.fromkeys(name for seeds in points for record in seeds for name in values(record)))
    for suffix, group in groupings(layers, grouped).items() if layers else ():
        found = []
        for seeds in points:
            each = [pooled(values(record), group, record.tensor_sizes if weighted else {}) for record in seeds]
            names = dict.fromkeys(name for one in each for name in one)
            found.append({name: fmean(one[name] for one in each if name in one) for name in names})
        yield suffix, tuple(dict.fromkeys(map(group, layers))), found


def groupings(layers: Sequence[str], grouped: bool = True) -> dict[str, Callable[[str], str]]:
    """Return suffix of a title -> group of a layer: by block and by role for more than MOST_LAYERS layers.

    A grouping that joins no layers, or all of them, is left out; without any, each layer is a group.
    """
    ways: dict[str, Callable[[str], str]] = {}
    if grouped and len(layers) > MOST_LAYERS:
        ways = {", by block": block_of, ", by role": role_of}
    useful = {name: group for name, group in ways.items() if 1 < len(set(map(group, layers))) < len(layers)}
    return useful or {"": lambda layer: layer}


def block_of(layer: str) -> str:
    """Return the name up to its first number: `layers.3` of `layers.3.mlp.up_proj.weight`."""
    parts = layer.split(".")
    number = next((index for index, part in enumerate(parts) if part.isdigit()), len(parts))
    return ".".join(parts[: number + 1])


def role_of(layer: str) -> str:
    """Return the name after its block: `mlp.up_proj` of `layers.3.mlp.up_proj.weight`; all of it outside of blocks."""
    return (layer.removeprefix(block_of(layer)).removeprefix(".") or layer).removesuffix(".weight")


def pooled(values: Mapping[str, float], group: Callable[[str], str], sizes: Mapping[str, int] = {}) -> dict[str, float]:
    """Return group -> mean of its layers' values, weighted by their sizes; without sizes all weigh the same."""
    members: dict[str, list[tuple[float, int]]] = {}
    for name, value in values.items():
        members.setdefault(group(name), []).append((value, sizes.get(name, 1)))
    return {
        name: math.fsum(value * size for value, size in each) / sum(size for _, size in each)
        for name, each in members.items()
    }


def densities(
    records: Records, comparison: Comparison, *, compared: bool = False, grouped: bool = False
) -> tuple[Profile, ...]:
    """Return the density of each tensor by method at one sparsity, mean over seeds.

    Args:
        records: stage key -> record
        comparison: comparison of the trials
        compared: leave out profiles of a single method, and of equal densities
        grouped: more than MOST_LAYERS tensors are shown by block and by role
    """

    def density(record: StageRecord) -> dict[str, float]:
        return {name: 1 - sparsity for name, sparsity in record.tensor_sparsity.items()}

    found = _profiles(records, comparison, density, grouped=grouped)
    return tuple(each for each in found if not compared or (len(each.series) > 1 and _differ(each)))


def _differ(profile: Profile) -> bool:
    """Whether the densities of a network's layers or of two methods differ by more than rounding to entries."""
    densities = [density for series in profile.series for density in series.y]
    return max(densities, default=0.0) - min(densities, default=0.0) > ROUNDING


def layer_errors(records: Records, comparison: Comparison, *, grouped: bool = False) -> tuple[Profile, ...]:
    """Return the error of each layer pruned with calibration data by method at one sparsity, mean over seeds."""

    def error(record: StageRecord) -> dict[str, float]:
        return {name: each.error for name, each in record.typed.scoring.layers.items() if each.error is not None}

    return tuple(_profiles(records, comparison, error, grouped=grouped, weighted=False))


def _profiles(
    records: Records,
    comparison: Comparison,
    values: Callable[[StageRecord], Mapping[str, float]],
    *,
    grouped: bool,
    weighted: bool = True,
) -> Iterator[Profile]:
    """Yield a profile for each panel and grouping of layers; lines without values are left out."""
    for panel in panels(comparison):
        level, points = _at_one_sparsity(panel)
        seeds = [[records[key] for key in point.stages] for point in points.values()]
        for suffix, names, found in _by_layer(seeds, values, grouped=grouped, weighted=weighted):
            lines = [
                series(label, [(float(index), each.get(name)) for index, name in enumerate(names)])
                for label, each in zip(points, found, strict=True)
                if each
            ]
            yield Profile(f"{panel.title}, {level}{suffix}", names, tuple(lines))


def _at_one_sparsity(panel: Panel) -> tuple[str, dict[str, Point]]:
    """Return the requested sparsity that most lines of a panel share, the largest if tied, and its points by line."""
    levels: dict[tuple[str, float], dict[str, Point]] = {}
    for point in panel.points:
        levels.setdefault((point.compared_by, round(point.asked_sparsity, 2)), {})[point.line] = point
    if not levels:
        return "", {}
    level = max(levels, key=lambda level: (min(len(levels[level]), METHODS), level[1]))
    asked_of, sparsity = level
    found = dict(list(levels[level].items())[:METHODS])
    words = f"{percent(sparsity, 0)} sparse" if asked_of == WEIGHTS else f"asked: {percent(sparsity, 0)} of {asked_of}"
    return words, found


def overlapping(comparison: Comparison) -> tuple[str, ...]:
    """Return the keys of the stages whose masks `overlap` compares, from panels with two or more methods."""
    chosen = [_at_one_sparsity(panel)[1].values() for panel in panels(comparison)]
    return tuple(key for points in chosen if len(points) > 1 for point in points for key in point.stages[:SEEDS])


def overlap(comparison: Comparison, readable: Container[str], shared: Shared) -> tuple[Matrix, ...]:
    """Return the fraction of kept entries that two methods have in common at one seed, mean over seeds, and by chance.

    The diagonal compares two seeds of one method. Stages that are not `readable` are left out.
    """
    matrices = []
    for panel in panels(comparison):
        level, points = _at_one_sparsity(panel)
        stages = {
            label: {seed: key for seed, key in zip(p.seeds[:SEEDS], p.stages[:SEEDS], strict=True) if key in readable}
            for label, p in points.items()
        }
        labels = tuple(label for label, seeds in stages.items() if seeds)
        found = {
            (a, b): _mean_shared(stages[a], stages[b], shared) for i, a in enumerate(labels) for b in labels[: i + 1]
        }
        cells = [[found.get((a, b)) or found.get((b, a)) for b in labels] for a in labels]
        if any(found[pair] for pair in found if pair[0] != pair[1]):
            values, chance = (tuple(tuple(cell and cell[of] for cell in row) for row in cells) for of in (0, 1))
            matrices.append(Matrix(f"{panel.title}, {level}", labels, labels, values, chance))
    return tuple(matrices)


def _mean_shared(one: Mapping[int, str], other: Mapping[int, str], shared: Shared) -> tuple[float, float] | None:
    pairs: Iterable[tuple[str, str]] = ((one[seed], other[seed]) for seed in one if seed in other)
    if one is other:
        pairs = combinations(one.values(), 2)
    found = [each for each in (shared(*pair) for pair in pairs) if each is not None]
    return (fmean(each[0] for each in found), fmean(each[1] for each in found)) if found else None


def overlap_of(records: Records, comparison: Comparison, read: ReadFile | None) -> tuple[Matrix, ...]:
    """Return an overlap matrix for each panel with readable masks of two methods for networks of equal shapes."""
    if read is None:
        return ()
    masks = _masks(records, read, overlapping(comparison))
    return overlap(comparison, masks, lambda one, other: _shared(masks[one], masks[other]))


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
        shown = f"shown without {beyond} of the networks" if len(readable) > 1 else "left out"
        _LOGGER.warning("The overlap of masks is %s: the figure compares at most %d entries of masks.", shown, MOST)
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


def layers_alone(curves: Sequence[SensitivityCurve]) -> tuple[Plot, ...]:
    """Return two plots for each model and data set: the primary metric and the loss, a line for each curve."""
    found: dict[str, list[SensitivityCurve]] = {}
    for curve in curves:
        found.setdefault(f"{curve.model} on {curve.data}", []).append(curve)
    plots = []
    for title, each in found.items():
        methods = {curve.method for curve in each}
        labels = [curve.layer if len(methods) == 1 else f"{curve.method}, {curve.layer}" for curve in each]
        for metric, figure in ((each[0].metric, "val"), (LOSS, "loss")):
            lines = tuple(
                series(label, [(100 * point.sparsity, getattr(point, figure)) for point in curve.points])
                for label, curve in zip(labels, each, strict=True)
            )
            words = "sparsity (% of the layer that is pruned alone)"
            plots.append(Plot(f"{title}, {metric.title}", metric, lines, None, words, "validation"))
    return tuple(plots)


def mask_history(records: Records, comparison: Comparison) -> tuple[Plot, ...]:
    """Return `SHARES` against the step of the last round's training, mean over seeds: two series a line.

    A line is shown at its sparsest point; lines whose masks do not change are left out.
    """
    plots = []
    for panel in panels(comparison):
        found: list[Series] = []
        for label, points in panel.lines.items():
            seeds = [records[key] for key in max(points, key=lambda point: point.sparsity).stages]
            if all(record.typed.mask_updates for record in seeds):
                found += _shares(label, seeds)
        if found:
            words = "optimizer steps of the training"
            plots.append(Plot(panel.title, SHARE, tuple(found[: 2 * CURVES]), None, words, "share of"))
    return tuple(plots)


def _shares(label: str, seeds: Sequence[StageRecord]) -> list[Series]:
    """Return a series for each of `SHARES`, mean over seeds at the steps that all of them have."""
    updates = [{update.step: vars(update) for update in record.typed.mask_updates} for record in seeds]
    steps = sorted(set.intersection(*map(set, updates)))
    ends = (0, len(steps) - 1) if steps else ()
    return [
        series(f"{label}, {words}", [(float(at), fmean(each[at][name] for each in updates)) for at in steps], ends)
        for name, words in SHARES.items()
    ]
