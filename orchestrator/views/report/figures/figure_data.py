"""What each figure of a comparison shows, as plain data. Pure; `orchestrator.views.report.figures.drawing` draws it."""

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

Panel = tuple[str, str]
"""Model and data set."""

FRONT = "Pareto front"
"""The series that joins the points that no other is better than in both."""
HEAT_ROWS, CURVES, LINES = 40, 6, 20
"""At most so many operating points in a heat map, curves in a plot, and lines in any figure: more cannot be read."""


@dataclass(frozen=True)
class Series:
    """One line of a plot; `low` and `high` bound its band and are None where there is no interval."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    marks: tuple[int, ...] | None = None
    """Indices of the points that are marked; None: each."""


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
    chance: tuple[tuple[float | None, ...], ...] = ()
    """What each value would be by chance, if that is known."""


def tradeoff(comparison: Comparison, against: str = "compression") -> tuple[Plot, ...]:
    """The primary metric on test against `compression` or `sparsity`: one line a method, its 95% interval as a band."""
    return _plots(comparison, lambda point: point.sparsity if against == "sparsity" else point.compression)


def cost(comparison: Comparison) -> tuple[Plot, ...]:
    """The same against the steps spent on a network from its initialisation on, with scoring; of several lines."""
    plots = _plots(comparison, lambda point: point.total_cost)
    return tuple(plot for plot in plots if len(plot.series) > 1)


def fine_tuning(comparison: Comparison) -> tuple[Plot, ...]:
    """The primary metric on the validation split against sparsity, before and after fine-tuning: two lines a method."""
    plots = []
    for panel in comparison.panels:
        series: list[Series] = []
        for label, points in lines_of(comparison, panel).items():
            before = _series(f"{label}, before", ((point.sparsity, point.val_before) for point in points))
            after = _series(f"{label}, after", ((point.sparsity, point.val) for point in points))
            series += [replace(each, low=(), high=()) for each in (before, after) if each.x]
        plots.append(Plot(title(panel), _metric(comparison, panel), tuple(series)))
    return tuple(plots)


def curves(plan: Plan, records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Plot, ...]:
    """The primary metric on the validation split while each line's sparsest networks train, mean over seeds."""
    plots = []
    for panel in comparison.panels:
        series = []
        for label, points in list(lines_of(comparison, panel).items())[:CURVES]:
            point = max(points, key=lambda point: point.sparsity)
            chains = [_chain(plan, records, key) for key in point.stages]
            series.append(_mean_curve(f"{label} to {point.sparsity:.1%}", chains))
        plots.append(Plot(title(panel), _metric(comparison, panel), tuple(series)))
    return tuple(plots)


def layer_sparsity(records: Mapping[str, StageRecord], comparison: Comparison) -> tuple[Matrix, ...]:
    """Sparsity of each tensor at each operating point, mean over seeds."""
    matrices = []
    for panel in comparison.panels:
        points = [point for line in lines_of(comparison, panel).values() for point in line]
        if not points:
            continue
        shown = points[:: -(-len(points) // HEAT_ROWS)]
        sparsities = [[records[key].tensor_sparsity for key in point.stages] for point in shown]
        columns = tuple(dict.fromkeys(name for seeds in sparsities for tensors in seeds for name in tensors))
        rows = tuple(f"{point.line} {point.sparsity:.1%}" for point in shown)
        values = tuple(
            tuple(mean_of_known(tensors.get(name) for tensors in seeds) for name in columns) for seeds in sparsities
        )
        matrices.append(Matrix(title(panel), rows, columns, values))
    return tuple(matrices)


def lines_of(comparison: Comparison, panel: Panel) -> dict[str, tuple[Point, ...]]:
    """Return the operating points of each line of a panel that figures show, by sparsity.

    Of many lines these are the LINES with the best mean on the validation split, in the order of all.
    """
    lines = {line: points for (model, data, line), points in comparison.lines.items() if (model, data) == panel}
    if len(lines) <= LINES:
        return lines
    shown = set(sorted(lines, key=lambda line: _validated(lines[line]), reverse=True)[:LINES])
    return {line: points for line, points in lines.items() if line in shown}


def left_out(comparison: Comparison) -> str:
    """Say of which panels figures do not show all lines; empty where they do."""
    counts = Counter((model, data) for model, data, _ in comparison.lines)
    many = [f"{count:,} lines of {title(panel)}" for panel, count in counts.items() if count > LINES]
    return f"Of {' and '.join(many)} figures show the {LINES} with the best means on validation." if many else ""


def _validated(points: Sequence[Point]) -> float:
    gains = [point.metric.gain(point.val.mean, 0.0) for point in points if point.val is not None]
    return fmean(gains) if gains else -math.inf


def _plots(comparison: Comparison, x: Callable[[Point], float]) -> tuple[Plot, ...]:
    plots = []
    for panel in comparison.panels:
        lines = lines_of(comparison, panel).items()
        series = tuple(_series(label, ((x(point), point.test) for point in points)) for label, points in lines)
        dense = [point.test for point in comparison.dense if (point.model, point.data) == panel]
        plots.append(Plot(title(panel), _metric(comparison, panel), series, dense[0] if len(dense) == 1 else None))
    return tuple(plots)


def _series(label: str, points: Iterable[tuple[float, Estimate | None]]) -> Series:
    known = sorted(((x, estimate) for x, estimate in points if estimate is not None), key=lambda pair: pair[0])
    x, means = tuple(x for x, _ in known), tuple(estimate.mean for _, estimate in known)
    return Series(label, x, means, tuple(each.low for _, each in known), tuple(each.high for _, each in known))


def _chain(plan: Plan, records: Mapping[str, StageRecord], key: str) -> list[StageRecord]:
    """Return the stages whose network `key` goes on from, the first one first, and that one."""
    chain: list[StageRecord] = []
    following: str | None = key
    while following is not None:
        chain.insert(0, records[following])
        following = plan.stages[following].parent
    return chain


def _curve(chain: Sequence[StageRecord]) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield ((place in the chain, step over all of it), primary metric on validation); of a round first once pruned."""
    offset = 0
    for place, record in enumerate(chain):
        name = f"val/{record.primary.name}"
        for step, metrics in ((0, record.before), *((point.step, point.metrics) for point in record.curve)):
            if name in metrics:
                yield (place, offset + step), metrics[name]
        offset += record.steps


def _mean_curve(label: str, chains: Sequence[Sequence[StageRecord]]) -> Series:
    """Average curves over the steps that all of them have, marked where each round begins."""
    curves = [dict(_curve(chain)) for chain in chains]
    shared = sorted(set.intersection(*map(set, curves)))
    first = {place: index for index, (place, _) in reversed([*enumerate(shared)])}
    marks = tuple(first[place] for place, record in enumerate(chains[0]) if record.round and place in first)
    means = tuple(fmean(curve[at] for curve in curves) for at in shared)
    return Series(label, tuple(float(step) for _, step in shared), means, marks=marks)


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are known, None where none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _metric(comparison: Comparison, panel: Panel) -> Metric:
    return next(p.metric for p in (*comparison.dense, *comparison.points) if (p.model, p.data) == panel)


def title(panel: Panel) -> str:
    """Return what a panel is called."""
    return f"{panel[0]} on {panel[1]}"
