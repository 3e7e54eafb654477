"""Allocation from measured losses: every allocation enumerated, exact totals, and never worse than uniform."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Mapping

import numpy as np
import pytest

from pruning.selection import measured_allocation
from pruning.selection.measured_allocation import least_loss

Curves = dict[str, dict[float, float]]


def drawn(draw: random.Random, layers: int, most: int) -> tuple[dict[str, int], Curves]:
    """Draw sizes, and curves that need not be monotone or convex."""
    sizes = {f"l{index}": draw.randint(1, most) for index in range(layers)}
    levels = [0.0, *sorted(draw.sample([0.25, 0.4, 0.5, 0.75, 0.9], draw.randint(1, 4))), 1.0]
    return sizes, {name: {s: draw.choice([0.0, 0.5, draw.random()]) for s in levels} for name in sizes}


def summed(sizes: Mapping[str, int], curves: Curves, counts: Mapping[str, int]) -> float:
    """Return the sum of the interpolated losses."""
    found = 0.0
    for name, count in counts.items():
        points = {round(s * sizes[name]): loss for s, loss in sorted(curves[name].items())}
        found += float(np.interp(count, [*points], [*points.values()]))
    return found


def test_no_allocation_of_the_total_has_a_lower_sum() -> None:
    draw = random.Random(0)
    for _ in range(60):
        sizes, curves = drawn(draw, draw.randint(1, 4), 7)
        sparsity = draw.choice([0.0, 0.3, 0.5, 0.8, 0.95])
        total = round(sparsity * sum(sizes.values()))
        every = itertools.product(*(range(size + 1) for size in sizes.values()))
        fits = [dict(zip(sizes, counts, strict=True)) for counts in every if sum(counts) == total]

        found = least_loss(sizes, curves, sparsity)

        assert sum(found.values()) == total
        assert all(0 <= found[name] <= size for name, size in sizes.items())
        least = min(summed(sizes, curves, each) for each in fits)
        assert summed(sizes, curves, found) == pytest.approx(least, abs=1e-12)


def test_a_layer_that_pruning_does_not_harm_is_pruned_first() -> None:
    curves = {"robust": {0: 1.0, 0.5: 1.0, 0.9: 1.0}, "fragile": {0: 1.0, 0.5: 2.0, 0.9: 5.0}}

    # 95 of 190 entries; the robust layer gives 90, so the fragile one 5, at a tenth of the way to 0.5
    assert least_loss({"robust": 100, "fragile": 90}, curves, 0.5) == {"robust": 90, "fragile": 5}


@pytest.mark.parametrize("totals", [16, 4096])
def test_large_layers_reach_the_total_and_are_never_worse_than_uniform(
    totals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measured_allocation, "TOTALS", totals)
    draw = random.Random(1)
    for sparsity in (0.5, 0.83, 0.9):
        sizes, curves = drawn(draw, 6, 100_000)

        found = least_loss(sizes, curves, sparsity)

        total = round(sparsity * sum(sizes.values()))
        uniform = {name: sparsity * size for name, size in sizes.items()}
        assert sum(found.values()) == total
        assert summed(sizes, curves, found) <= summed(sizes, curves, uniform) + 1e-3


@pytest.mark.parametrize(
    ("curves", "sparsity", "said"),
    [
        ({"a": {0: 1.0, 0.5: 2.0}}, 0.5, "must give 'b' finite losses"),
        ({"a": {0: 1.0, 0.5: 2.0}, "b": {0.5: 1.0}}, 0.5, "must give 'b' finite losses"),
        ({"a": {0: 1.0, 0.5: float("nan")}, "b": {0: 1.0}}, 0.5, "must give 'a' finite losses"),
        ({"a": {0: 1.0, 0.5: 2.0}, "b": {0: 1.0, 0.9: 2.0}}, 0.8, "outside of the measured sparsities"),
        ({"a": {0: 1.0}, "b": {0: 1.0}, "c": {0: 1.0}}, 0.0, "of the layers in `sizes`"),
        ({"a": {0: 1.0}, "b": {0: 1.0}}, 1.0, "must lie in [0, 1)"),
    ],
)
def test_what_was_not_measured_is_refused(curves: Curves, sparsity: float, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        least_loss({"a": 10, "b": 10}, curves, sparsity)
