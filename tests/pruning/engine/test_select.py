"""Selection of units: golden masks for magnitude, windows and rows; ties, signs and units against brute force."""

from __future__ import annotations

import pytest
import torch
from golden_network import W1, Golden, bits
from hypothesis import given, settings
from hypothesis import strategies as st

from pruning.choices.axes import Scope, Unit
from pruning.selection.allocation import allocate
from pruning.selection.selection_groups import groups_of, select

GOLDEN = {"fc1.weight": (4, 4), "fc2.weight": (3, 4)}


def masks_of(tensors, sparsity, unit=None, scope=None, alive=None):
    cut = groups_of({name: tensor.shape for name, tensor in tensors.items()}, unit, scope)
    reduced = cut.reduce(tensors)
    kept = select(reduced, cut, allocate(cut, sparsity, reduced, alive), alive)
    return cut.expand(kept)


def magnitudes():
    return {name: p.detach().abs() for name, p in Golden().named_parameters() if name.endswith("weight")}


def test_magnitude_global_and_by_layer():
    assert bits(masks_of(magnitudes(), 0.5, scope=Scope("global"))) == "1010110101110110100001000011"
    assert bits(masks_of(magnitudes(), 0.5, scope=Scope("layer"))) == "1010100101100110100011010011"


def test_two_of_four():
    assert bits(masks_of(magnitudes(), None, scope=Scope("window"))) == "1010100101100110101011000011"


def test_rows_of_a_layer():
    """Wanda's scores of the first layer of the golden network."""
    norms = torch.tensor([1.7578396, 3.0232433, 1.8193405, 0.76811457])
    masks = masks_of({"a": torch.tensor(W1).abs() * norms}, 0.5, scope=Scope("row"))

    assert "".join(str(int(kept)) for kept in masks["a"].flatten()) == "0110110001100110"


def test_of_equal_scores_the_lowest_index_goes_first():
    even = {"a": torch.ones(2, 4), "b": torch.ones(1, 4)}

    assert masks_of(even, 0.5, scope=Scope("global"))["a"].tolist() == [[False] * 4, [False, False, True, True]]
    assert masks_of(even, 0.25)["b"].tolist() == [[False, True, True, True]]
    assert masks_of(even, None, scope=Scope("window", n=1))["a"].tolist() == [[False, False, False, True]] * 2


def test_signed_scores_rank_as_they_are():
    assert masks_of({"a": torch.tensor([[-3.0, -1.0, 2.0, 0.5]])}, 0.5)["a"].tolist() == [[False, False, True, True]]


def test_windows_of_a_convolution_run_over_input_channels_at_one_kernel_position():
    scores = torch.rand(3, 8, 2, 5, generator=torch.Generator().manual_seed(0))

    mask = masks_of({"a": scores}, None, scope=Scope("window", n=3, m=4))["a"]

    for o in range(3):
        for y in range(2):
            for x in range(5):
                for start in (0, 4):
                    window, kept = scores[o, start : start + 4, y, x], mask[o, start : start + 4, y, x]
                    assert kept.sum() == 3
                    assert not kept[window.argmin()]


@given(
    rows=st.integers(1, 4),
    windows=st.integers(1, 3),
    m=st.integers(1, 6),
    n=st.integers(1, 6),
    seed=st.integers(0, 999),
)
@settings(max_examples=50)
def test_every_window_keeps_its_n_best_survivors(rows, windows, m, n, seed):
    n = min(n, m)
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-2, 3, (rows, windows * m), generator=generator).double()
    scores[scores == -2] = -torch.inf  # a survivor may rank as low as anything
    alive = torch.rand(rows, windows * m, generator=generator) < 0.7

    cut = groups_of({"a": scores.shape}, scope=Scope("window", n=n, m=m))
    mask = cut.expand(select(cut.reduce({"a": scores}), cut, {"a": n}, {"a": alive.flatten()}))["a"]

    for row in range(rows):
        for start in range(0, windows * m, m):
            living = [i for i in range(start, start + m) if alive[row, i]]
            best = sorted(living, key=lambda i: (float(scores[row, i]), i))[max(0, len(living) - n) :]
            assert [i for i in range(start, start + m) if mask[row, i]] == sorted(best)


def test_blocks_go_whole():
    mask = masks_of(magnitudes(), 3 / 7, Unit("block", size=4), Scope("global"))

    rows = torch.cat([tensor.sum(1) for tensor in magnitudes().values()])
    kept = torch.cat([mask["fc1.weight"], mask["fc2.weight"]])
    assert kept.any(1).tolist() == kept.all(1).tolist() == (rows >= rows.sort().values[3]).tolist()


@pytest.mark.parametrize(
    ("reduce", "values"),
    [
        ("sum", [1.7, 2.1, 1.75, 1.4]),
        ("l2", [0.99498744, 1.17047, 0.9367497, 0.8660254]),
        ("square_of_sum", [2.89, 4.41, 3.0625, 1.96]),
    ],
)
def test_filters_reduce_to_the_golden_norms(reduce, values):
    cut = groups_of({"fc1.weight": (4, 4)}, Unit("channel", reduce=reduce))

    assert cut.reduce(magnitudes())["fc1.weight"].tolist() == pytest.approx(values, rel=1e-7)


def test_signed_entries_under_l1_and_sum():
    signed = {"fc1.weight": torch.tensor(W1)}
    assert groups_of({"fc1.weight": (4, 4)}, Unit("channel", reduce="l1")).reduce(signed)["fc1.weight"].tolist() == (
        pytest.approx([1.7, 2.1, 1.75, 1.4])
    )
    inputs = groups_of({"fc1.weight": (4, 4)}, Unit("channel", dim=1))
    assert inputs.reduce(signed)["fc1.weight"].tolist() == pytest.approx(torch.tensor(W1).sum(0).tolist())


def test_channels_of_any_size_compare_once_normalised():
    wide, narrow = torch.full((2, 100), 0.1), torch.full((2, 4), 0.5)
    scope = Scope("global", normalise="size")

    assert masks_of({"a": wide, "b": narrow}, 0.5, Unit("channel"), Scope("global"))["b"].sum() == 0
    assert masks_of({"a": wide, "b": narrow}, 0.5, Unit("channel"), scope)["a"].sum() == 0
    assert masks_of({"a": wide, "b": narrow}, 0.5, Unit("channel", reduce="l2"), scope)["a"].sum() == 0


def test_scores_may_come_by_unit():
    cut = groups_of({"a": torch.Size((3, 2))}, Unit("channel"))

    kept = select(cut.reduce({"a": torch.tensor([3.0, 1.0, 2.0])}), cut, {"a": 2})

    assert cut.expand(kept)["a"].tolist() == [[True, True], [False, False], [True, True]]


def test_the_channels_of_the_outputs_can_be_spared():
    assert list(groups_of(GOLDEN, Unit("channel", spare_last=True)).sizes) == ["fc1.weight"]
    with pytest.raises(ValueError, match="leaves nothing to prune"):
        groups_of({"a": (4, 4)}, Unit("channel", spare_last=True))


def test_channels_without_entries_are_no_units():
    cut = groups_of({"a": (4, 0), "b": (0, 4), "c": (2, 2)}, Unit("channel"))

    assert cut.sizes == {"a": 0, "b": 0, "c": 2}
    assert allocate(cut, 0.5) == {"a": 0, "b": 0, "c": 1}


@pytest.mark.parametrize(
    ("unit", "scope", "said"),
    [
        (Unit(), Scope("window", m=4), r"`scope.m` \(=4\) must divide the input dimension.* has 1 inputs"),
        (Unit("channel", dim=4), Scope(), r"`unit.dim` \(=4\) must be a channel dimension"),
    ],
)
def test_what_does_not_divide_is_refused(unit, scope, said):
    with pytest.raises(ValueError, match=said):
        groups_of({"a": torch.Size((2, 1, 2, 2))}, unit, scope)


def test_scores_that_do_not_fit_are_refused():
    cut = groups_of(GOLDEN)
    with pytest.raises(ValueError, match=r"lack 'fc2.weight'"):
        cut.reduce({"fc1.weight": torch.ones(4, 4)})
    with pytest.raises(ValueError, match=r"of shape \(4, 3\)"):
        cut.reduce({"fc1.weight": torch.ones(4, 4), "fc2.weight": torch.ones(4, 3)})
    undefined = {"fc1.weight": torch.full((4, 4), torch.nan), "fc2.weight": torch.ones(3, 4)}
    for scope, sparsity in ((Scope(), 0.5), (Scope("window"), None)):
        with pytest.raises(ValueError, match=r"Pruning fc1.weight.*NaN"):
            masks_of(undefined, sparsity, scope=scope)
