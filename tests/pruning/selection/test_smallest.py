"""Selection of the smallest entries: the exact count, against a sort, on every dtype and layout."""

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from selection_cases import FLOATS, cases, reference
from torch import Tensor

from pruning.selection import smallest
from pruning.selection.random_subset import prune_random_, prune_random_across_
from pruning.selection.smallest import best_of_pools, prune_smallest_, prune_smallest_across_

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


@pytest.mark.slow
@given(case=cases(), magnitude=st.booleans())
@settings(max_examples=300)
def test_smallest_is_a_stable_sort(case, magnitude):
    mask, scores, count = case
    before = scores.clone()
    expected = reference(mask, scores, count, magnitude)
    assert prune_smallest_(mask, scores, count, magnitude=magnitude) is mask
    assert torch.equal(mask, expected)
    assert torch.equal(scores, before)


@given(case=cases(), magnitude=st.booleans())
@settings(max_examples=100)
def test_the_way_of_other_devices_gives_the_same(case, magnitude):
    mask, scores, count = case
    expected = reference(mask, scores, count, magnitude)
    smallest.smallest_on_device([mask], [scores], count, magnitude, ["scores"])
    assert torch.equal(mask, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [*FLOATS, torch.bool])
def test_on_every_device(device, dtype):
    generator = torch.Generator(device).manual_seed(3)
    scores = torch.randn(50, 40, device=device, generator=generator)
    mask = torch.ones(50, 40, device=device).to(dtype)
    expected = reference(mask.cpu(), scores.cpu(), 1500, True)
    prune_smallest_(mask, scores, 1500, magnitude=True)
    assert torch.equal(mask.cpu(), expected)
    prune_random_(mask, 300, generator=generator)
    assert int(mask.count_nonzero()) == 200
    on_host = prune_random_(mask.cpu(), 100, generator=torch.Generator().manual_seed(4))
    prune_random_(mask, 100, generator=torch.Generator().manual_seed(4))
    assert torch.equal(mask.cpu(), on_host)


@pytest.mark.parametrize("dtype", FLOATS)
def test_across_tensors_ranks_them_as_one(dtype):
    generator = torch.Generator().manual_seed(1)
    scores = [(torch.randn(shape, generator=generator) * 3).round().to(dtype) for shape in [(30, 20), (7,), (9, 50)]]
    masks = [torch.ones_like(score) for score in scores]
    masks[1][:3] = 0
    flat = torch.cat([m.flatten() for m in masks])
    expected = reference(flat, torch.cat([s.flatten() for s in scores]), 800, False)
    prune_smallest_across_(masks, scores, 800)
    assert torch.equal(torch.cat([m.flatten() for m in masks]), expected)
    prune_random_across_(masks, 100)
    assert sum(int(m.count_nonzero()) for m in masks) == 600 + 4 + 450 - 800 - 100


def test_mask_values_other_than_one_survive():
    mask = torch.tensor([2.0, 0.0, 0.5, -3.0])
    assert prune_smallest_(mask, torch.tensor([1.0, 0.0, 3.0, 2.0]), 1).tolist() == [0.0, 0.0, 0.5, -3.0]


def test_integer_scores():
    mask = torch.ones(300)
    scores = torch.arange(300).flip(0)
    assert prune_smallest_(mask, scores, 299).nonzero().tolist() == [[0]]


@pytest.mark.parametrize("value", [0.0, math.inf, 1.5])
def test_equal_scores_go_from_the_front(value):
    mask = torch.ones(3000)
    prune_smallest_(mask, torch.full((3000,), value), 1234)
    assert mask.tolist() == [0.0] * 1234 + [1.0] * 1766


@pytest.mark.parametrize("count", [1, 40, 2960, 2999])
@pytest.mark.parametrize("way", [1, -1])
@pytest.mark.parametrize("sampled", ["beyond", "from end to end", "one of few values"])
def test_a_sample_that_misleads_costs_no_exactness(count, way, sampled, monkeypatch):
    scores = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    wrong = np.full(4096, way * 5.0) if sampled == "beyond" else np.linspace(-5.0, 5.0, 4096) ** 9
    if sampled == "one of few values":
        scores, wrong = scores.round(), np.full(4096, float(way))
    monkeypatch.setattr(smallest, "_sample", lambda *_: wrong)
    mask = torch.ones(3000)
    assert torch.equal(prune_smallest_(mask, scores, count), reference(torch.ones(3000), scores, count, False))


@pytest.mark.parametrize("stuck", ["as wide as before", "beyond the end"])
def test_a_search_that_gets_nowhere_ends(stuck, monkeypatch):
    passes = []
    count_around = smallest._count_around

    def counted(*arguments):
        passes.append(arguments)
        assert len(passes) < 50
        return count_around(*arguments)

    monkeypatch.setattr(smallest, "_count_around", counted)
    monkeypatch.setattr(
        smallest, "_bracket", lambda sample, _, outer: outer if stuck == "as wide as before" else (9.0, outer[1])
    )
    scores = torch.randn(3000, generator=torch.Generator().manual_seed(2))
    mask = prune_smallest_(torch.ones(3000), scores, 1234)
    assert torch.equal(mask, reference(torch.ones(3000), scores, 1234, False))
    assert len(passes) <= smallest.PASSES + 2


@pytest.mark.parametrize("position", [0, 70, 2999])
@pytest.mark.parametrize("prune", [prune_smallest_, pytest.param("device", id="on_device")])
def test_nan_is_refused_where_it_counts_and_nothing_changes(position, prune):
    def act(mask, scores):
        if prune == "device":
            smallest.smallest_on_device([mask], [scores], 2000, True, ["scores"])
        else:
            prune(mask, scores, 2000, magnitude=True)

    scores = torch.randn(3000)
    scores[position] = math.nan
    mask = torch.ones(3000)
    with pytest.raises(ValueError, match="`scores` holds NaN where the mask keeps an entry"):
        act(mask, scores)
    assert mask.all()
    mask[position] = 0
    act(mask, scores)
    assert mask.count_nonzero() == 999


def test_the_tensor_with_nan_is_named():
    scores = [torch.ones(3), torch.tensor([1.0, math.nan])]
    masks = [torch.ones(3), torch.ones(2)]
    with pytest.raises(ValueError, match=r"`scores\[1\]` holds NaN"):
        prune_smallest_across_(masks, scores, 1)
    with pytest.raises(ValueError, match=r"`fc2.weight` holds NaN"):
        prune_smallest_across_(masks, scores, 1, names=["fc1.weight", "fc2.weight"])


def test_the_count_may_be_a_function_of_the_survivors():
    masks = [torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.ones(5)]
    prune_smallest_across_(masks, [torch.arange(4.0), torch.arange(5.0)], lambda survivors: survivors // 2)
    assert [mask.tolist() for mask in masks] == [[0, 0, 0, 1], [0, 0, 1, 1, 1]]
    prune_random_across_(masks, lambda survivors: survivors)
    assert not any(mask.any() for mask in masks)
    with pytest.raises(ValueError, match=r"`count` \(=1\) must lie in \[0, 0\]"):
        prune_random_(masks[0], lambda survivors: survivors + 1)


@pytest.mark.parametrize("count", [-1, 4])
def test_counts_beyond_the_survivors_are_refused(count):
    mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    with pytest.raises(ValueError, match=rf"`count` \(={count}\) must lie in \[0, 3\]"):
        prune_smallest_(mask, torch.ones(4), count)
    with pytest.raises(ValueError, match=rf"`count` \(={count}\)"):
        prune_random_(mask, count)
    with pytest.raises(ValueError, match=rf"`count` \(={count}\)"):
        smallest.smallest_on_device([mask], [torch.ones(4)], count, False, ["scores"])
    assert mask.sum() == 3


def test_scores_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"`scores` of shape \(3, 2\) must have its mask's shape \(2, 3\)"):
        prune_smallest_(torch.ones(2, 3), torch.ones(3, 2), 1)


@pytest.mark.parametrize("kept", [1.0, 0.5, 0.01])
def test_working_memory_is_under_half_a_byte_an_entry(kept, monkeypatch):
    monkeypatch.undo()
    size = 4_000_000
    scores = torch.randn(size, generator=torch.Generator().manual_seed(15))
    mask = (torch.rand(size, generator=torch.Generator().manual_seed(16)) < kept).float()
    survivors = int(mask.count_nonzero())
    tracemalloc.start()  # NumPy reports its arrays; torch's own temporaries are single chunks
    prune_smallest_(mask, scores, survivors // 2, magnitude=True)
    prune_random_(mask, survivors // 4)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * size


def misleading(size: int) -> Tensor:
    """Return random scores with an outlier at every sampled position."""
    scores = torch.randn(size, generator=torch.Generator().manual_seed(17))
    stride = size // smallest.SAMPLE
    for number in range(-(-size // smallest.CHUNK)):
        start = number * smallest.CHUNK
        scores[start : start + smallest.CHUNK][number * 40503 % stride :: stride] = 1e9
    return scores


@pytest.mark.parametrize("count", [800_000, 3_400_000])
@pytest.mark.parametrize(
    "make",
    [
        lambda size: torch.full((size,), 0.5),
        lambda size: torch.randn(size).clamp_min_(1.28),  # 90% are equal
        lambda size: torch.randint(-1, 2, (size,)).float(),
        misleading,
    ],
    ids=["equal", "mostly equal", "three values", "misleading"],
)
def test_working_memory_whatever_the_scores(make, count, monkeypatch):
    monkeypatch.undo()
    scores, mask = make(4_000_000), torch.ones(4_000_000)
    tracemalloc.start()
    prune_smallest_(mask, scores, count)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.5 * scores.numel()
    assert torch.count_nonzero(mask) == scores.numel() - count
    assert scores[mask == 0].max() <= scores[mask == 1].min()


@pytest.mark.parametrize("width", [1, 2, 4, 7, 8])
def test_narrow_pools_are_ranked_as_wide_ones_are(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(width)
    scores = torch.randint(-2, 3, (500, width), generator=generator).float()
    alive = torch.ones_like(scores, dtype=torch.bool)
    for count in range(width + 1):
        found = best_of_pools(scores, alive, count)
        with monkeypatch.context() as patched:
            patched.setattr(smallest, "NARROW", 0)
            assert torch.equal(best_of_pools(scores, alive, count), found)
        assert (found.sum(1) == count).all()
