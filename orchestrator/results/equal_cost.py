"""Methods paired at equal training cost and sparsity, and by window of held-out text. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from orchestrator.compare.comparison import Comparison, Point
from orchestrator.compare.secondary_figures import WindowDifference
from orchestrator.compare.statistics import Estimate, paired_difference
from orchestrator.results.trial_results import ResultsError, not_there
from orchestrator.views.report.plain_files import parts, window_row

DENSE = "dense"
"""Name of dense networks in place of a method."""
ROUNDING = 1e-9
"""Relative excess over a budget that rounding of means may cause."""
COLUMNS = (
    *("model", "data", "method", "requested_sparsity", "budget", "line", "round", "sparsity", "total_training_macs"),
    *("metric", "test_mean", "test_std", "test_low", "test_high", "seeds"),
    *("reference", "reference_training_macs"),
    *("difference_mean", "difference_std", "difference_low", "difference_high"),
)
Asked = tuple[str, float | None]
"""Method and requested sparsity."""


def at_equal_cost(
    comparison: Comparison, budget: float | None = None, reference: str | None = None
) -> list[dict[str, Any]]:
    """Return for each method and sparsity the point with the largest training cost up to a budget, with `COLUMNS`.

    The cost of a point is its mean `total_training_macs`. Lines of one method, for example trainings of several
    lengths, are candidates together. A method without a point up to the budget has None in the columns of the point.

    Args:
        comparison: comparison of the trials
        budget: multiply-accumulates of training; None: those of each point's own dense training
        reference: method whose test figures at the same sparsity are subtracted, seed by seed; None: the dense network
            within the budget, or else the cheapest one

    Raises:
        ResultsError: the budget is not a positive number, or no method has the name `reference`
    """
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0):
        raise ResultsError(
            f"`budget` (={budget!r}) must be a number of multiply-accumulates above 0, or None for those of the dense "
            "training."
        )
    names = list(dict.fromkeys(_asked(point)[0] for point in comparison.shown))
    if reference is not None and reference not in names:
        raise not_there("reference", reference, names, "the sweep has")
    tests = {row.stage: row.test for row in comparison.rows}
    return [
        row for panel in comparison.panels for row in _panel_rows(comparison, panel, budget, reference or DENSE, tests)
    ]


def _panel_rows(
    comparison: Comparison, panel: tuple[str, str], budget: float | None, reference: str, tests: Mapping[str, float]
) -> Iterator[dict[str, Any]]:
    candidates: dict[Asked, list[Point]] = {}
    for point in comparison.shown:
        if point.panel == panel:
            candidates.setdefault(_asked(point), []).append(point)
    chosen = {asked: _costliest(points, budget) for asked, points in candidates.items()}
    for asked, points in candidates.items():
        first, found = points[0], chosen[asked]
        other = _reference(candidates, chosen, reference, asked[1])
        row = dict.fromkeys(COLUMNS) | {"model": first.model, "data": first.data, "metric": first.metric.name}
        row |= {"method": asked[0], "requested_sparsity": asked[1], "reference": reference}
        row["budget"] = first.dense_training_macs if budget is None else budget
        row["reference_training_macs"] = None if other is None else other.total_training_macs
        yield row | ({} if found is None else _figures(found, other, tests))


def _figures(point: Point, other: Point | None, tests: Mapping[str, float]) -> dict[str, Any]:
    """Return the columns of a chosen point, and of its difference from another one."""
    found: dict[str, Any] = {
        name: getattr(point, name) for name in ("line", "round", "sparsity", "total_training_macs")
    }
    found["seeds"] = " ".join(map(str, point.seeds))
    of_seeds = None if other is None else paired_difference(point.by_seed(tests), other.by_seed(tests))
    for name, estimate in (("test", point.test), ("difference", of_seeds)):
        found |= parts(name, estimate)
    return found


def _reference(
    candidates: Mapping[Asked, Sequence[Point]], chosen: Mapping[Asked, Point | None], name: str, sparsity: float | None
) -> Point | None:
    """Return the point to compare with: of a method at the same sparsity, or of the dense network."""
    if name != DENSE:
        return chosen.get((name, sparsity))
    dense = [point for asked, points in candidates.items() if asked[0] == DENSE for point in points]
    within = chosen.get((DENSE, None))
    return within or min(dense, key=lambda point: point.total_training_macs or 0.0, default=None)


def _asked(point: Point) -> Asked:
    return (point.method, point.requested_sparsity) if point.round else (DENSE, None)


def _costliest(points: Sequence[Point], budget: float | None) -> Point | None:
    """Return the point with the largest cost up to the budget."""
    within = []
    for point in points:
        cost, most = point.total_training_macs, point.dense_training_macs if budget is None else budget
        if cost is not None and most is not None and cost <= most * (1 + ROUNDING):
            within.append((cost, point))
    return max(within, key=lambda each: each[0])[1] if within else None


def paired_by_window(comparison: Comparison, reference: str | None) -> list[dict[str, Any]]:
    """Return a row for each pair of lines at one sparsity, or for each pair with `reference`, which is subtracted.

    Raises:
        ResultsError: no pair has the line `reference`
    """
    found = comparison.windows
    if reference is None:
        return [*map(window_row, found)]
    names = list(dict.fromkeys(name for each in found for name in (each.reference, each.line)))
    if reference not in names:
        raise not_there("reference", reference, names, "networks were compared by window with")
    oriented = (each if each.reference == reference else _reversed(each) for each in found)
    return [window_row(each) for each in oriented if each.reference == reference and each.line != "dense"]


def _reversed(each: WindowDifference) -> WindowDifference:
    windows, draws = map(_negative, (each.windows, each.draws))
    return replace(each, line=each.reference, reference=each.line, windows=windows, draws=draws)


def _negative(each: Estimate) -> Estimate:
    low, high = (None if end is None else -end for end in (each.high, each.low))
    return replace(each, mean=-each.mean, low=low, high=high)
