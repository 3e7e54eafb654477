"""What each figure of a comparison shows, as plain data. Pure; `orchestrator.views.report.drawing` draws it."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.statistics import Estimate
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

Panel = tuple[str, str]
"""Model and data set."""

HEAT_ROWS, CURVES, MASKS = 40, 6, 24
"""At most so many operating points in a heat map, curves in a plot, masks in an overlap matrix: more cannot be read."""


@dataclass(frozen=True)
class Series:
    """One line of a plot; `low` and `high` bound its band and are None where there is no interval."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Plot:
    """Lines in one pair of axes, and the dense network as a horizontal line with its band."""

    title: str
    metric: Metric
    series: tuple[Series, ...]
    reference: Estimate | None = None


@dataclass(frozen=True)
class Matrix:
    """A grid of values in [0, 1]; None where there is no value."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]

    @property
    def has_pairs(self) -> bool:
        """Whether a value below the diagonal is known."""
        return any(value is not None for index, row in enumerate(self.values) for value in row[:index])


def tradeoff(comparison: Comparison) -> tuple[Plot, ...]:
    """The primary metric on test against compression: one line a method, the 95% interval over seeds as its band."""
    return _plots(comparison, lambda point: point.compression)


def cost(comparison: Comparison) -> tuple[Plot, ...]:
    """The same against the optimizer steps spent on a network, from its initialisation on."""
    return _plots(comparison, lambda point: point.total_steps)


def fine_tuning(comparison: Comparison) -> tuple[Plot, ...]:
    """The primary metric on the validation split against sparsity, before and after fine-tuning: two lines a method."""
    plots = []
    for panel in comparison.panels:
        series: list[Series] = []
        for label, points in lines_of(comparison, panel).items():
            before = _series(f"{label}, before", ((point.sparsity, point.val_before) for point in points))
            after = _series(f"{label}, after", ((point.sparsity, point.val) for point in points))
            series += [replace(each, low=(), high=()) for each in (before, after) if each.x]
        plots.append(Plot(_title(panel), _metric(comparison, panel), tuple(series)))
    return tuple(plots)


def curves(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Plot, ...]:
    """The primary metric on the validation split while each line's sparsest networks train, mean over seeds."""
    plots = []
    for panel in comparison.panels:
        series = []
        for label, points in list(lines_of(comparison, panel).items())[:CURVES]:
            point = max(points, key=lambda point: point.sparsity)
            steps, means = _mean_curve([dict(_curve(plan, records, key)) for key in point.stages])
            series.append(Series(f"{label} to {point.sparsity:.1%}", steps, means))
        plots.append(Plot(_title(panel), _metric(comparison, panel), tuple(series)))
    return tuple(plots)


def layer_sparsity(records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Matrix, ...]:
    """Sparsity of each tensor at each operating point, mean over seeds."""
    matrices = []
    for panel in comparison.panels:
        points = [point for line in lines_of(comparison, panel).values() for point in line]
        shown = points[:: -(-len(points) // HEAT_ROWS) or 1]
        sparsities = [[records[key].tensor_sparsity for key in point.stages] for point in shown]
        columns = tuple(dict.fromkeys(name for seeds in sparsities for tensors in seeds for name in tensors))
        rows = tuple(f"{point.line} {point.sparsity:.1%}" for point in shown)
        values = tuple(tuple(_mean(tensors.get(name) for tensors in seeds) for name in columns) for seeds in sparsities)
        matrices.append(Matrix(_title(panel), rows, columns, values))
    return tuple(matrices)


def overlapping(comparison: Comparison) -> tuple[str, ...]:
    """Return the stages whose masks `overlap` compares, none where no panel has two."""
    chosen = [tuple(_comparable(comparison, panel)[1].values()) for panel in comparison.panels]
    return tuple(key for keys in chosen if len(keys) > 1 for key in keys)


def overlap(
    comparison: Comparison, readable: Container[str], iou: Callable[[str, str], float | None]
) -> tuple[Matrix, ...]:
    """Intersection over union of what is kept, for each pair of masks: what `iou(stage key, stage key)` returns.

    Stages that are not `readable` are left out.
    """
    matrices = []
    for panel in comparison.panels:
        level, chosen = _comparable(comparison, panel)
        chosen = {label: key for label, key in chosen.items() if key in readable}
        labels, keys = tuple(chosen), tuple(chosen.values())
        ious = {(a, b): iou(a, b) for i, a in enumerate(keys) for b in keys[: i + 1]}
        values = tuple(tuple(ious.get((a, b), ious.get((b, a))) for b in keys) for a in keys)
        chance = (1 - level) / (1 + level)
        title = f"{_title(panel)}, {level:.0%} sparse; by chance {chance:.2f}"
        matrices.append(Matrix(title, labels, labels, values))
    return tuple(matrices)


def _comparable(comparison: Comparison, panel: Panel) -> tuple[float, dict[str, str]]:
    """Return the sparsity at which most masks of a panel can be compared, and these: label -> stage key.

    Of levels with equally many the sparsest is taken.
    """
    levels: dict[float, dict[str, str]] = {}
    for label, points in lines_of(comparison, panel).items():
        for point in points:
            for seed, key in zip(point.seeds, point.stages, strict=True):
                levels.setdefault(round(point.sparsity, 2), {})[f"{label}, seed {seed}"] = key
    if not levels:
        return 0.0, {}
    level = max(levels, key=lambda sparsity: (min(len(levels[sparsity]), MASKS), sparsity))
    return level, dict(list(levels[level].items())[:MASKS])


def lines_of(comparison: Comparison, panel: Panel) -> dict[str, tuple[Point, ...]]:
    """Return the operating points of each line of a panel, by sparsity."""
    return {line: points for (model, data, line), points in comparison.lines.items() if (model, data) == panel}


def _plots(comparison: Comparison, x: Callable[[Point], float]) -> tuple[Plot, ...]:
    plots = []
    for panel in comparison.panels:
        lines = lines_of(comparison, panel).items()
        series = tuple(_series(label, ((x(point), point.test) for point in points)) for label, points in lines)
        dense = [point.test for point in comparison.dense if (point.model, point.data) == panel]
        plots.append(Plot(_title(panel), _metric(comparison, panel), series, dense[0] if len(dense) == 1 else None))
    return tuple(plots)


def _series(label: str, points: Iterable[tuple[float, Estimate | None]]) -> Series:
    known = sorted(((x, estimate) for x, estimate in points if estimate is not None), key=lambda pair: pair[0])
    x, means = tuple(x for x, _ in known), tuple(estimate.mean for _, estimate in known)
    return Series(label, x, means, tuple(each.low for _, each in known), tuple(each.high for _, each in known))


def _curve(plan: Plan, records: Mapping[str, StageRecord], key: str) -> Iterator[tuple[int, float]]:
    """Yield (step over the whole chain, primary metric on the validation split) of the chain that ends in `key`."""
    chain: list[StageRecord] = []
    following: str | None = key
    while following is not None:
        chain.insert(0, records[following])
        following = plan.stages[following].parent
    offset = 0
    for record in chain:
        name = f"val/{record.primary.name}"
        for point in record.curve:
            if name in point.metrics:
                yield offset + point.step, point.metrics[name]
        offset += record.steps


def _mean_curve(curves: Sequence[Mapping[int, float]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Average curves over the steps that all of them have."""
    steps = sorted(set.intersection(*(set(curve) for curve in curves))) if curves else []
    return tuple(map(float, steps)), tuple(fmean(curve[step] for curve in curves) for step in steps)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _metric(comparison: Comparison, panel: Panel) -> Metric:
    return next(p.metric for p in (*comparison.dense, *comparison.points) if (p.model, p.data) == panel)


def _title(panel: Panel) -> str:
    return f"{panel[0]} on {panel[1]}"
