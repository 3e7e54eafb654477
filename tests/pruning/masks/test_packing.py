"""Packing of masks: sizes near the entropy, and errors for damaged bytes."""

import math
import tracemalloc
import zlib
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pruning.masks.mask_files import GAPS, pack, unpack


@st.composite
def bit_arrays(draw):
    size = draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    mask = rng.random(size) < draw(st.sampled_from([0, 0.001, 0.01, 0.1, 0.5, 0.9, 0.999, 1]))
    return np.repeat(mask, draw(st.sampled_from([1, 7])))


@given(bit_arrays())
def test_packing_round_trip(mask):
    assert np.array_equal(unpack(pack(mask), mask.size), mask)


@pytest.mark.parametrize("sparsity", [0.01, 0.2, 0.5, 0.7, 0.9, 0.99])
def test_packed_size_is_within_five_percent_of_the_entropy(sparsity):
    size = 1_000_000
    mask = np.ones(size, bool)
    mask[np.random.default_rng(3).permutation(size)[: round(sparsity * size)]] = False
    entropy = -sparsity * math.log2(sparsity) - (1 - sparsity) * math.log2(1 - sparsity)
    assert len(pack(mask)) < 1.05 * entropy * size / 8


def test_patterns_pack_far_below_the_entropy():
    rows = np.random.default_rng(4).random(400) < 0.5
    assert len(pack(np.repeat(rows, 500))) < 2000
    assert len(pack(np.tile(rows, 500))) < 2000


@given(bit_arrays(), st.integers(0, 2**16), st.integers(1, 255))
def test_damaged_bytes_are_refused_or_still_a_mask_of_that_size(mask, position, change):
    packed = bytearray(pack(mask))
    packed[position % len(packed)] ^= change
    try:
        found = unpack(bytes(packed), mask.size)
    except ValueError:
        return
    assert found.dtype == np.bool_
    assert found.size == mask.size


def test_a_gap_that_ends_at_the_size_is_refused():
    mask = np.random.default_rng(5).random(10_000) < 0.01
    mask[-1] = True
    packed = pack(mask)

    assert packed[0] == GAPS
    with pytest.raises(ValueError, match="beyond 9999 entries"):
        unpack(packed, 9_999)


@pytest.mark.parametrize(("count", "width"), [(5_000_000, 0), (300_000, 62)])
def test_a_few_bytes_that_claim_many_gaps_take_little_memory(count, width):
    size, rest = 5_000_000, b"\xff" * ((count * width + 7) // 8)
    stream = zlib.compressobj(9, zlib.DEFLATED, -15)
    forged = bytes([1, 1, width]) + stream.compress(bytes(count)) + stream.flush() + rest
    tracemalloc.start()
    with pytest.raises(ValueError, match="beyond") if width else nullcontext():
        unpack(forged, size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 5 * size + 40e6


def test_many_gaps_are_read_piece_by_piece():
    for sparsity in (0.05, 0.3, 0.9995):
        mask = np.random.default_rng(6).random(600_000) >= sparsity
        assert np.array_equal(unpack(pack(mask), mask.size), mask)


@pytest.mark.parametrize("density", [0.02, 0.5])
def test_bytes_that_are_cut_off_are_refused(density):
    mask = np.random.default_rng(5).random(600) < density
    packed = pack(mask)
    for length in range(len(packed)):
        with pytest.raises(ValueError, match=r"its? "):
            unpack(packed[:length], mask.size)
