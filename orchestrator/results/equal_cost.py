"""Lines of a sweep at equal training cost, paired by seed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.statistics import paired_difference
from orchestrator.results.missing_names import ResultsError, not_there

ROUNDING = 1e-9
"""Relative excess over a budget that rounding of means may cause."""
COLUMNS = (
    *("model", "data", "line", "budget", "round", "sparsity", "total_training_macs", "metric"),
    *("test_mean", "test_std", "test_low", "test_high", "seeds"),
    *("reference", "difference_mean", "difference_std", "difference_low", "difference_high"),
)


def at_equal_cost(
    comparison: Comparison, budget: float | None = None, reference: str | None = None
) -> list[dict[str, Any]]:
    """Return the point of each line with the largest training cost up to a budget, with `COLUMNS`.

    The cost of a point is its mean `total_training_macs`. A line without a point up to the budget has None in the
    columns of the point.

    Args:
        comparison: comparison of the trials
        budget: multiply-accumulates of training; None: those of each line's own dense training
        reference: line whose test figures are subtracted, seed by seed; None: the dense network of the panel

    Raises:
        ResultsError: the budget is not a positive number, or no line has the name `reference`
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
        raise ResultsError(
            f"`budget` (={budget!r}) must be a number of multiply-accumulates above 0, or None for those of the dense "
            "training."
        )
    names = list(dict.fromkeys(point.line for point in (*comparison.dense, *comparison.operating_points)))
    if reference is not None and reference not in names:
        raise not_there("reference", reference, names, "the sweep has")
    tests = {row.stage: row.test for row in comparison.rows}
    return [row for panel in comparison.panels for row in _panel_rows(comparison, panel, budget, reference, tests)]


def _panel_rows(
    comparison: Comparison, panel: tuple[str, str], budget: float | None, reference: str | None, tests: dict[str, float]
) -> Iterator[dict[str, Any]]:
    lines: list[Sequence[Point]] = [(point,) for point in comparison.dense if (point.model, point.data) == panel]
    lines += [points for (model, data, _), points in comparison.lines.items() if (model, data) == panel]
    against = reference or next((points[0].line for points in lines if not points[0].round), None)
    chosen = [(points[0], _costliest(points, budget)) for points in lines]
    other = next((point for first, point in chosen if first.line == against), None)
    for first, point in chosen:
        row = dict.fromkeys(COLUMNS) | {"model": first.model, "data": first.data, "line": first.line}
        row |= {"budget": first.dense_training_macs if budget is None else budget, "reference": against}
        row["metric"] = first.metric.name
        if point is not None:
            row |= {name: getattr(point, name) for name in ("round", "sparsity", "total_training_macs")}
            row["seeds"] = " ".join(map(str, point.seeds))
            of_seeds = None if other is None else paired_difference(_by_seed(point, tests), _by_seed(other, tests))
            for name, found in (("test", point.test), ("difference", of_seeds)):
                row |= {f"{name}_{part}": getattr(found, part, None) for part in ("mean", "std", "low", "high")}
        yield row


def _costliest(points: Sequence[Point], budget: float | None) -> Point | None:
    """Return the point with the largest cost up to the budget, the sparsest one if several cost the same."""
    within = []
    for point in points:
        cost, most = point.total_training_macs, point.dense_training_macs if budget is None else budget
        if cost is not None and most is not None and cost <= most * (1 + ROUNDING):
            within.append((cost, point.sparsity, point))
    return max(within, key=lambda each: each[:2])[2] if within else None


def _by_seed(point: Point, tests: dict[str, float]) -> dict[int, float]:
    return {seed: tests[stage] for seed, stage in zip(point.seeds, point.stages, strict=True)}
