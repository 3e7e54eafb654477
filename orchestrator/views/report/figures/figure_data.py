"""Plain data of a comparison's figures. Pure; `orchestrator.views.report.figures.drawing` draws them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.statistics import Estimate
from orchestrator.core.metrics import Metric
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.planning.number_formats import percent, whole_number

Panel = tuple[str, str]
"""Model and data set."""

FRONT = "Pareto front"
"""Label of the series of points that no other point beats in both quantities."""
HEAT_ROWS, CURVES, LINES, MOST_LAYERS = 40, 6, 20, 40
"""Maximum number of operating points in a heat map, curves in a plot, lines in a figure, layers in a figure: more
cannot be read."""


@dataclass(frozen=True)
class Series:
    """One line of a plot; `low` and `high` bound y, `left` and `right` x, None at points without an interval."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    marks: tuple[int, ...] | None = None
    """Indices of points with a marker; None: all points."""
    left: tuple[float | None, ...] = ()
    right: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Plot:
    """Lines in one pair of axes, and the dense network (`reference`) as a horizontal line with its band."""

    title: str
    metric: Metric
    series: tuple[Series, ...]
    reference: Estimate | None = None
    x_label: str = ""
    """Label of the x axis, if it differs between the plots of a figure."""


@dataclass(frozen=True)
class Matrix:
    """Grid of values in [0, 1]; None for a missing value."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    chance: tuple[tuple[float | None, ...], ...] = ()
    """Value of each cell by chance, if known."""


def texts(comparison: Comparison) -> tuple[str, ...]:
    """Return `test` and the names of the further test sets."""
    return ("test", *dict.fromkeys(each.name for point in comparison.points for each in point.further))


def tradeoff(comparison: Comparison, against: str = "compression", text: str = "test") -> tuple[Plot, ...]:
    """Return the primary metric against `compression` or `sparsity`, with its 95% interval, line by line.

    Args:
        comparison: comparison of the trials
        against: quantity on the x axis
        text: `test`, or the name of a further test set
    """
    plots = _plots(comparison, lambda point: point.sparsity if against == "sparsity" else point.compression, text)
    if text == "test":
        return plots
    return tuple(replace(plot, title=f"{plot.title}: {text}") for plot in plots if any(each.x for each in plot.series))


def cost(comparison: Comparison) -> tuple[Plot, ...]:
    """Return the primary metric on test against training cost in steps; needs two lines, and points of unequal cost."""
    plots = _plots(comparison, lambda point: point.total_cost)
    return tuple(plot for plot in plots if len(plot.series) > 1 and _spread_out(plot.series))


def training_macs(comparison: Comparison) -> tuple[Plot, ...]:
    """Return the primary metric on test against multiply-accumulates of all training; dense networks are points.

    Points without a recorded cost are left out, and panels in which fewer than two lines have points, or all points
    one cost.
    """
    plots = []
    for panel in comparison.panels:
        lines = lines_of(comparison, panel)
        dense = {point.line: (point,) for point in comparison.dense if (point.model, point.data) == panel}
        series = [_against_training_macs(label, points) for label, points in [*lines.items(), *dense.items()]]
        pruned = series[: len(lines)]
        if sum(bool(each.x) for each in pruned) > 1 and _spread_out(pruned):
            plots.append(Plot(title(panel), _metric(comparison, panel), tuple(each for each in series if each.x)))
    return tuple(plots)


def _against_training_macs(label: str, points: Sequence[Point]) -> Series:
    costs = ((point.total_training_macs, point.test) for point in points)
    return _series(label, ((cost, test) for cost, test in costs if cost is not None))


def fine_tuning(comparison: Comparison) -> tuple[Plot, ...]:
    """Return the primary metric on validation against sparsity, before and after fine-tuning: two series a line.

    Lines that were not trained after pruning are left out.
    """
    plots = []
    for panel in comparison.panels:
        series: list[Series] = []
        for label, points in lines_of(comparison, panel).items():
            if not any(point.val_before is not None and point.val_before != point.val for point in points):
                continue
            before = _series(f"{label}, before", ((point.sparsity, point.val_before) for point in points))
            after = _series(f"{label}, after", ((point.sparsity, point.val) for point in points))
            series += [replace(each, low=(), high=()) for each in (before, after) if each.x]
        if series:
            plots.append(Plot(title(panel), _metric(comparison, panel), tuple(series)))
    return tuple(plots)


def curves(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Plot, ...]:
    """Return the training curves on validation of each line's sparsest networks, mean over seeds.

    Panels without a training are left out.
    """
    plots = []
    for panel in comparison.panels:
        series = []
        for label, points in list(lines_of(comparison, panel).items())[:CURVES]:
            point = max(points, key=lambda point: point.sparsity)
            chains = [_chain(plan, records, key) for key in point.stages]
            series.append(_mean_curve(f"{label} to {percent(point.sparsity)}", chains))
        if _spread_out(series):
            plots.append(Plot(title(panel), _metric(comparison, panel), tuple(series)))
    return tuple(plots)


def layer_sparsity(
    records: Mapping[str, StageRecord], comparison: Comparison, *, grouped: bool = False
) -> tuple[Matrix, ...]:
    """Return the sparsity of each tensor at each operating point, mean over seeds.

    Args:
        records: stage key -> record
        comparison: comparison of the trials
        grouped: more than MOST_LAYERS tensors are shown in two matrices: by block, and by role
    """
    matrices = []
    for panel in comparison.panels:
        points = [point for line in lines_of(comparison, panel).values() for point in line]
        if not points:
            continue
        shown = points[:: -(-len(points) // HEAT_ROWS)]
        rows = tuple(f"{point.line} {percent(point.sparsity)}" for point in shown)
        seeds = [[records[key] for key in point.stages] for point in shown]
        layers = list(dict.fromkeys(name for each in seeds for record in each for name in record.tensor_sparsity))
        for suffix, group in groupings(layers, grouped).items():
            found = [[pooled(each.tensor_sparsity, group, each.tensor_sizes) for each in point] for point in seeds]
            columns = tuple(dict.fromkeys(map(group, layers)))
            values = tuple(
                tuple(mean_of_known(tensors.get(name) for tensors in point) for name in columns) for point in found
            )
            matrices.append(Matrix(title(panel) + suffix, rows, columns, values))
    return tuple(matrices)


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


def lines_of(comparison: Comparison, panel: Panel) -> dict[str, tuple[Point, ...]]:
    """Return the operating points of the panel's lines that figures show, sorted by sparsity.

    A panel with more than LINES lines shows the LINES with the best means on validation, in the original order.
    """
    lines = {line: points for (model, data, line), points in comparison.lines.items() if (model, data) == panel}
    if len(lines) <= LINES:
        return lines
    shown = set(sorted(lines, key=lambda line: _validated(lines[line]), reverse=True)[:LINES])
    return {line: points for line, points in lines.items() if line in shown}


def left_out(comparison: Comparison) -> str:
    """Return a note on panels whose figures do not show all lines; empty if they do."""
    counts = Counter((model, data) for model, data, _ in comparison.lines)
    many = [f"{title(panel)} ({whole_number(count)} lines)" for panel, count in counts.items() if count > LINES]
    return (
        f"Figures show only the {LINES} lines with the best means on validation for {', '.join(many)}." if many else ""
    )


def _validated(points: Sequence[Point]) -> float:
    gains = [point.metric.gain(point.val.mean, 0.0) for point in points if point.val is not None]
    return fmean(gains) if gains else -math.inf


def figure_on(point: Point, text: str) -> Estimate | None:
    """Return the primary metric of a point on `test` or on a further test set."""
    return point.test if text == "test" else next((each.test for each in point.further if each.name == text), None)


def _spread_out(series: Iterable[Series]) -> bool:
    """Whether the points have more than one place on the x axis."""
    return len({x for each in series for x in each.x}) > 1


def _plots(comparison: Comparison, x: Callable[[Point], float], text: str = "test") -> tuple[Plot, ...]:
    plots = []
    for panel in comparison.panels:
        lines = lines_of(comparison, panel).items()
        series = tuple(
            _series(label, ((x(point), figure_on(point, text)) for point in points)) for label, points in lines
        )
        dense = [figure_on(point, text) for point in comparison.dense if (point.model, point.data) == panel]
        plots.append(Plot(title(panel), _metric(comparison, panel), series, dense[0] if len(dense) == 1 else None))
    return tuple(plots)


def _series(label: str, points: Iterable[tuple[float, Estimate | None]]) -> Series:
    known = sorted(((x, estimate) for x, estimate in points if estimate is not None), key=lambda pair: pair[0])
    x, means = tuple(x for x, _ in known), tuple(estimate.mean for _, estimate in known)
    return Series(label, x, means, tuple(each.low for _, each in known), tuple(each.high for _, each in known))


def _chain(plan: Plan, records: Mapping[str, StageRecord], key: str) -> list[StageRecord]:
    """Return the records from the first stage of the chain to stage `key`."""
    chain: list[StageRecord] = []
    following: str | None = key
    while following is not None:
        chain.insert(0, records[following])
        following = plan.stages[following].parent
    return chain


def _curve(chain: Sequence[StageRecord]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield ((place in the chain, total step), primary metric on validation); a round starts after pruning."""
    offset = 0
    for place, record in enumerate(chain):
        name = f"val/{record.primary.name}"
        for step, metrics in ((0, record.before), *((point.step, point.metrics) for point in record.curve)):
            if name in metrics:
                yield (place, offset + step), metrics[name]
        offset += record.steps


def _mean_curve(label: str, chains: Sequence[Sequence[StageRecord]]) -> Series:
    """Average curves over their common steps, with a mark at the start of each round."""
    curves = [dict(_curve(chain)) for chain in chains]
    shared = sorted(set.intersection(*map(set, curves)))
    first = {place: index for index, (place, _) in reversed([*enumerate(shared)])}
    marks = tuple(first[place] for place, record in enumerate(chains[0]) if record.round and place in first)
    means = tuple(fmean(curve[at] for curve in curves) for at in shared)
    return Series(label, tuple(float(step) for _, step in shared), means, marks=marks)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values, None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _metric(comparison: Comparison, panel: Panel) -> Metric:
    return next(p.metric for p in (*comparison.dense, *comparison.points) if (p.model, p.data) == panel)


def title(panel: Panel) -> str:
    """Return the title of a panel."""
    return f"{panel[0]} on {panel[1]}"
