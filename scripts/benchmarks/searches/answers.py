"""Answers of a full grid, and how far the answers of searches are from them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from orchestrator.compare.statistics import LEVEL, estimate, has_spread, matches
from orchestrator.sweep.search.frontier_points import hypervolume, nondominated
from scripts.benchmarks.searches.competitors import Factory, race
from scripts.benchmarks.searches.search_table import ACCURACY, Outcome, Setting, Table

ROOM = 0.1
"""Distance of the hypervolume's reference from the worst values, as a fraction of the range, as in the search."""
POINTS = 100
"""Points of accuracy in 1."""


def largest_match(table: Table, method: str) -> int:
    """Return the index of the largest sparsity that the test of the whole line matches with dense; -1 for none."""
    metric = replace(ACCURACY, margin=table.margin)
    tested = (estimate(table.gains((method, sparsity))) for sparsity in table.sparsities)
    return [*matches(tested, metric)].count("yes") - 1


def distances(table: Table, outcome: Outcome) -> dict[str, int]:
    """Return by how many sparsities the answer of `matching` exceeds the grid's, for each method."""
    found = dict(outcome.settings)
    places = {sparsity: index for index, sparsity in enumerate(table.sparsities)}
    answers = {method: places[found[method]] if method in found else -1 for method in table.methods}
    return {method: answers[method] - largest_match(table, method) for method in table.methods}


def best_method(table: Table, sparsity: float) -> str:
    """Return the method with the best mean at a sparsity."""
    return max(table.methods, key=lambda method: table.mean_gain((method, sparsity)))


def is_right(table: Table, setting: Setting) -> bool:
    """Whether a method is the best at its sparsity, or the 95% interval of its difference from the best holds 0."""
    method, sparsity = setting
    best = best_method(table, sparsity)
    pairs = zip(table.gains(setting), table.gains((best, sparsity)), strict=True)
    found = estimate([own - other for own, other in pairs], LEVEL)
    if method == best or found is None or found.high is None or not has_spread(found):
        return method == best or table.mean_gain(setting) == table.mean_gain((best, sparsity))
    return found.high >= 0


def regret(table: Table, chosen: Sequence[Setting]) -> float:
    """Return the mean over sparsities of the best mean gain minus that of the chosen method, in points."""
    lost = (
        table.mean_gain((best_method(table, setting[1]), setting[1])) - table.mean_gain(setting) for setting in chosen
    )
    return POINTS * fmean(lost)


def hypervolume_share(table: Table, settings: Sequence[Setting]) -> float:
    """Return the hypervolume of the settings over that of the frontier of the whole grid."""
    points = [table.objectives(setting) for setting in table.settings]
    ranges = [(min(each), max(each)) for each in zip(*points, strict=True)]
    reference = tuple(high + (ROOM * (high - low) if high > low else 1.0) for low, high in ranges)
    front = [points[index] for index in nondominated(points)]
    ours = [table.objectives(setting) for setting in settings]
    return hypervolume(ours, reference) / hypervolume(front, reference)


def raced(table: Table, outcome: Outcome, new: Factory, workers: int, draw: random.Random) -> list[Setting]:
    """Return the method that a competitor chooses at each sparsity, for as many networks as `halving` has trained."""
    found = []
    for sparsity in table.sparsities:
        methods = draw.sample(table.methods, len(table.methods))
        budget = sum(outcome.spent[method, sparsity] for method in methods)
        gains = [table.gains((method, sparsity)) for method in methods]
        best = race(new(len(methods), len(table.seeds), draw), gains, budget, workers)
        found.append((methods[best], sparsity))
    return found
