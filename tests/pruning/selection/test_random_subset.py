"""Random selection: the exact count and uniform subsets, on every dtype and layout."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from selection_cases import cases

from pruning.selection import random_subset, smallest
from pruning.selection.random_subset import prune_random_


@pytest.mark.slow
@given(case=cases(), seed=st.integers(0, 2**32))
@settings(max_examples=300)
def test_random_prunes_exactly_the_count_of_survivors(case, seed):
    mask, _, count = case
    before = mask.clone()
    assert prune_random_(mask, count, generator=torch.Generator().manual_seed(seed)) is mask
    assert int(before.count_nonzero() - mask.count_nonzero()) == count
    assert torch.equal(mask, torch.where(mask != 0, before, torch.zeros_like(before)))
    again = prune_random_(before.contiguous(), count, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(mask, again), "the same seed prunes the same entries, whatever the strides"


def test_nothing_to_prune_draws_nothing():
    generator = torch.Generator().manual_seed(5)
    state = generator.get_state()
    prune_random_(torch.ones(500), 0, generator=generator)
    assert torch.equal(generator.get_state(), state)


def singly(monkeypatch):
    monkeypatch.setattr(random_subset, "FEW", 1.0)


def lanes(monkeypatch):
    monkeypatch.setattr(random_subset, "FEW", 0.0)


def device(monkeypatch):
    def on_device(masks, count, generator):
        keys = [torch.empty(mask.shape, dtype=torch.int64).random_(generator=generator) for mask in masks]
        smallest.smallest_on_device(masks, keys, count, False, [""] * len(masks))

    monkeypatch.setattr(
        random_subset, "prune_random_across_", lambda masks, k, generator: on_device(masks, k, generator)
    )


WAYS = [singly, lanes, device]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_subset_is_equally_likely(way, masked, monkeypatch):
    """Chi-square over all C(6, 3) = 20 subsets of the survivors, at a fixed seed."""
    way(monkeypatch)
    monkeypatch.setattr(smallest, "CHUNK", 4)
    generator = torch.Generator().manual_seed(11)
    start = torch.tensor([1.0, 0.0, 1, 1, 1, 0, 1, 1]) if masked else torch.ones(6)
    places = start.nonzero().flatten().tolist()
    seen = dict.fromkeys(itertools.combinations(places, 3), 0)
    for _ in range(1000):
        mask = start.clone()
        random_subset.prune_random_across_([mask], 3, generator=generator)
        seen[tuple(i for i in places if mask[i] == 0)] += 1
    assert sum(seen.values()) == 1000
    assert stats.chisquare(list(seen.values())).pvalue > 0.001


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_all_or_nearly_all_may_go(kept):
    mask = torch.ones(300_000)
    prune_random_(mask, 300_000 - kept, generator=torch.Generator().manual_seed(17))
    assert mask.count_nonzero() == kept


@pytest.mark.parametrize("count", [100, 5_000, 90_000, 99_900])
def test_every_region_is_pruned_alike(count, monkeypatch):
    """Chi-square over 50 equal regions of a large tensor: all are pruned equally often, with few pruned or few kept."""
    monkeypatch.undo()
    generator = torch.Generator().manual_seed(12)
    pruned = torch.zeros(100_000)
    for _ in range(20):
        pruned += prune_random_(torch.ones(100_000), count, generator=generator) == 0
    regions = pruned.view(50, -1).sum(1)
    # Drawing without replacement multiplies the variance of a region's count by 1 - count / n.
    statistic = float(((regions - regions.mean()) ** 2 / regions.mean()).sum()) / (1 - count / 100_000)
    assert 0.001 < stats.chi2(49).sf(statistic) < 0.999


@pytest.mark.parametrize("count", [10, 4000])
def test_relabelling_the_survivors_changes_nothing(count):
    """The draw depends only on the ranks of survivors: moving them or adding dead entries keeps the chosen ranks."""
    dense = prune_random_(torch.ones(5000), count, generator=torch.Generator().manual_seed(13))
    for every in (3, 50):
        mask = torch.zeros(5000 * every)
        mask[::every] = 1
        prune_random_(mask, count, generator=torch.Generator().manual_seed(13))
        assert torch.equal(mask[::every], dense)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool])
def test_the_mask_dtype_has_no_say_in_the_draw(dtype):
    masks = [torch.ones(4000), torch.ones(4000).to(dtype)]
    for mask in masks:
        prune_random_(mask, 3000, generator=torch.Generator().manual_seed(14))
    assert torch.equal(masks[0] != 0, masks[1] != 0)
