"""Allocations: golden densities, exact sums, and targets that cannot be reached."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from golden_network import LENET_5, LENET_300_100
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning.choices.axes import Scope, Unit
from pruning.schedule import targets
from pruning.selection.allocation import allocate, er, erk, largest_remainder, uniform_plus
from pruning.selection.selection_groups import groups_of

ERK_300_100 = {
    0.2: (0.162241231, 0.469362084, 1),
    0.1: (0.0795677705, 0.230188679, 1),
    0.05: (0.0384841327, 0.11133417, 0.918506901),
    0.02: (0.0153936531, 0.0445336679, 0.36740276),
}
ERK_5 = {
    0.1: (1, 0.0870724638, 0.088432971, 1),
    0.05: (0.72611623, 0.0374769667, 0.0380625443, 1),
    0.02: (0.277886517, 0.0143425299, 0.014566632, 0.457168142),
}
CASES = [(LENET_300_100, density, want) for density, want in ERK_300_100.items()] + [
    (LENET_5, density, want) for density, want in ERK_5.items()
]


def sizes_of(shapes):
    return [math.prod(shape) for shape in shapes.values()]


def counts(shapes, sparsity, allocation, alive=None, **scope):
    cut = groups_of(shapes, scope=Scope("layer", allocation, **scope))
    return allocate(cut, sparsity, alive=alive)


@pytest.mark.parametrize(("shapes", "density", "want"), CASES)
def test_erk_densities_are_those_of_the_tables(shapes, density, want):
    assert erk([*shapes.values()], sizes_of(shapes), density) == pytest.approx(want, rel=5e-9)


def test_erk_counts_of_a_tenth_of_lenet_300_100():
    assert list(counts(LENET_300_100, 0.9, "erk").values()) == [18714, 6906, 1000]


def test_er_is_erk_where_all_layers_are_linear_and_heeds_no_kernels():
    shapes = list(LENET_300_100.values())
    assert er(shapes, sizes_of(LENET_300_100), 0.1) == pytest.approx(erk(shapes, sizes_of(LENET_300_100), 0.1))
    conv, flat = er([(50, 20, 5, 5), (50, 20)], [25000, 1000], 0.02)
    assert conv == flat == pytest.approx(0.02)


@pytest.mark.parametrize(("density", "rest"), [(0.1, 0.0977647059), (0.05, 0.0471176471)])
def test_uniform_plus_of_lenet_5(density, rest):
    found = uniform_plus(list(LENET_5.values()), sizes_of(LENET_5), density)

    assert found == pytest.approx([1, rest, rest, 0.2], rel=1e-9)


def test_uniform_plus_exempts_no_linear_first_layer_and_is_even_above_a_fifth():
    assert uniform_plus(list(LENET_300_100.values()), sizes_of(LENET_300_100), 0.5) == pytest.approx([0.5] * 3)
    first, *_, last = uniform_plus(list(LENET_300_100.values()), sizes_of(LENET_300_100), 0.1)
    assert first < 0.1 < last == 0.2


@given(
    shapes=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=5),
    sparsity=st.floats(0, 0.99),
    allocation=st.sampled_from(("uniform", "er", "erk")),
)
@settings(max_examples=60)
def test_the_sum_is_exact(shapes, sparsity, allocation):
    named = {f"w{i}": tuple(shape) for i, shape in enumerate(shapes)}
    total = sum(sizes_of(named))

    found = counts(named, sparsity, allocation)

    assert sum(found.values()) == total - round(sparsity * total)
    assert all(0 <= kept <= math.prod(named[name]) for name, kept in found.items())


@pytest.mark.parametrize("raw", [er, erk])
@pytest.mark.parametrize("shapes", [LENET_300_100, LENET_5])
def test_every_density_grows_with_the_density_of_all(shapes, raw):
    tables = [raw([*shapes.values()], sizes_of(shapes), k / 200) for k in range(1, 201)]

    for less, more in itertools.pairwise(tables):
        assert all(a <= b + 1e-12 for a, b in zip(less, more, strict=True))
    assert tables[-1] == pytest.approx([1.0] * len(shapes))


@pytest.mark.parametrize("allocation", ["er", "erk"])
def test_power_0_is_uniform(allocation):
    assert counts(LENET_5, 0.93, allocation, power=0.0) == counts(LENET_5, 0.93, "uniform")


def test_each_tensor_loses_the_fraction_by_itself():
    assert counts({"a": (5, 1), "b": (3, 1)}, 0.5, "each") == {"a": 3, "b": 1}  # 2.5 and 1.5 go: half to even
    assert counts({"a": (5, 1), "b": (3, 1)}, 0.5, "uniform") == {"a": 3, "b": 1}  # 4 of 8: the earlier remainder


def test_of_equal_remainders_the_earlier_tensor_comes_first():
    quotas = {"a": 1.5, "b": 1.5, "c": 1.0}

    assert largest_remainder(quotas, 4, dict.fromkeys(quotas, 0), dict.fromkeys(quotas, 9)) == {"a": 2, "b": 1, "c": 1}


def test_what_a_minimum_takes_is_given_back_by_the_smallest_remainder():
    quotas = {"a": 2.9, "b": 2.1, "c": 0.0}
    least, most = {"a": 0, "b": 0, "c": 2}, dict.fromkeys(quotas, 9)

    assert largest_remainder(quotas, 5, least, most) == {"a": 2, "b": 1, "c": 2}


def test_a_nested_cubic_schedule_never_gives_back():
    """Largest remainder is not monotone: LeNet-5's conv1 would go from 144 to 145 at update 454 of 500."""
    updates = targets("cubic", 0.98, 500)[440:460]
    free_before = before = counts(LENET_5, updates[0], "erk")
    gave_back = False
    for sparsity in updates[1:]:
        alive = {name: torch.arange(math.prod(LENET_5[name])) < kept for name, kept in before.items()}
        now, free = counts(LENET_5, sparsity, "erk", alive), counts(LENET_5, sparsity, "erk")
        gave_back |= any(free[name] > free_before[name] for name in free)
        assert all(now[name] <= before[name] for name in now)
        assert sum(now.values()) == 430500 - round(sparsity * 430500)
        before, free_before = now, free
    assert gave_back


def test_a_global_ranking_keeps_the_best_of_each_tensor_first():
    cut = groups_of({"a": (4, 1), "b": (4, 1)}, scope=Scope("global", min_kept=1))
    scores = {"a": torch.tensor([1.0, 2, 3, 4]), "b": torch.tensor([10.0, 20, 30, 40])}

    assert allocate(cut, 0.5, scores) == {"a": 1, "b": 3}
    assert allocate(groups_of({"a": (4, 1), "b": (4, 1)}, scope=Scope("global")), 0.5, scores) == {"a": 0, "b": 4}


def test_densities_may_be_given_by_pattern():
    found = counts(LENET_300_100, None, "given", densities={"fc3.*": 0.26, "fc*": 0.09})

    assert found == {"fc1.weight": 21168, "fc2.weight": 2700, "fc3.weight": 260}
    assert counts({"a": (10, 1)}, 0.5, "given", densities={"a": 0.5}) == {"a": 5}


def test_rows_lose_the_floor_and_windows_keep_n():
    rows = groups_of({"a": (3, 100)}, scope=Scope("row"))

    assert allocate(rows, 0.29) == {"a": 71}  # .29 of 100 is 28.999...96 in floating point
    assert allocate(rows, 0.295) == {"a": 71}
    long = groups_of({"a": (7, 150)}, scope=Scope("row"))
    assert [int(7 * 150 - allocate(long, s)["a"].sum()) for s in (0.005, 0.01, 0.99)] == [5, 11, 1040], "not 0, 7, 1036"
    assert allocate(groups_of({"a": (3, 8)}, scope=Scope("window", n=1, m=4)), None) == {"a": 1}


def test_units_are_counted_not_entries():
    channels = groups_of({"a": (10, 3), "b": (4, 7)}, Unit("channel"), Scope("layer"))

    assert allocate(channels, 0.5) == {"a": 5, "b": 2}


@pytest.mark.parametrize(
    ("shapes", "scope", "sparsity", "said"),
    [
        (LENET_5, Scope("layer", "uniform_plus"), 0.999, "uniform_plus"),
        (LENET_5, Scope("layer", "erk", min_kept=500), 0.9999, r"`scope.min_kept` \(=500\) keeps 2000 units"),
        (LENET_5, Scope("layer", "given", densities={"conv*": 1.0}), None, "lacks 'fc1.weight'"),
        (
            LENET_5,
            Scope("layer", "given", densities={"*": 0.5, "fc9*": 0.5}),
            None,
            r"`scope.densities` \(='fc9\*'\) must name tensors",
        ),
        (LENET_5, Scope("layer", "given", densities={"*": 0.5}), 0.9, "cannot be reached by `scope.densities`"),
        (LENET_5, Scope("layer"), None, r"`sparsity` \(=None\) must be a fraction"),
        (LENET_5, Scope("global"), 0.5, "`scores` \\(=None\\) must be given"),
        ({"a": (2, 8)}, Scope("window"), 0.75, "must be 0.5 where 2 of each 4"),
    ],
)
def test_what_cannot_be_reached_is_refused(shapes, scope, sparsity, said):
    with pytest.raises(ValueError, match=said):
        allocate(groups_of(shapes, scope=scope), sparsity)


def test_fewer_survivors_than_wanted_are_refused():
    alive = {"a": torch.tensor([True, False, False, False]), "b": torch.ones(4, dtype=torch.bool)}

    assert counts({"a": (4, 1), "b": (4, 1)}, 0.5, "uniform", alive) == {"a": 1, "b": 3}
    alive["b"][1:] = False
    with pytest.raises(ValueError, match="4 units must be kept, but only 2 survive"):
        counts({"a": (4, 1), "b": (4, 1)}, 0.5, "uniform", alive)


FEW = {"a": torch.tensor([True, True, False, False, True, False, False, False])}


@pytest.mark.parametrize(
    ("scope", "sparsity", "said"),
    [
        (Scope(), 0.5, r"`sparsity` \(=0.5\) cannot be reached: 'a' must keep 4 of its 8 units, but only 3 survive"),
        (
            Scope("layer", "given", densities={"a": 0.5}),
            None,
            r"`scope.densities` \(=.*\) cannot be reached: 'a'",
        ),
        (Scope("row"), 0.5, "'a' must keep 2 of each 4 units, but only 1 survive"),
        (Scope("window"), None, r"`scope.n` \(=2\) cannot be reached: 'a' must keep 2 of each 4"),
    ],
)
def test_tensors_that_are_counted_by_themselves_keep_what_is_asked_or_are_refused(scope, sparsity, said):
    cut = groups_of({"a": (2, 4)}, scope=scope)
    with pytest.raises(ValueError, match=said):
        allocate(cut, sparsity, alive=FEW)

    assert allocate(cut, sparsity, alive=FEW, capped=True) == {"a": 2 if scope.kind in ("row", "window") else 3}
    assert allocate(groups_of({"a": (2, 4)}), 5 / 8, alive=FEW) == {"a": 3}


def test_min_kept_by_layer_may_be_what_rounding_allows_and_no_more():
    assert counts({"a": (4, 1)}, 0.9, "each", min_kept=1) == {"a": 1}  # 0.4 of a unit is to be kept
    for scope, sparsity in (
        (Scope(min_kept=2), 0.9),
        (Scope("layer", "given", densities={"a": 0.1}, min_kept=2), None),
    ):
        with pytest.raises(
            ValueError, match=r"leaves 0 of the 4 units of 'a', fewer than `scope.min_kept` \(=2\); lower"
        ):
            allocate(groups_of({"a": (4, 1)}, scope=scope), sparsity)
