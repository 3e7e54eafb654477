"""Random selection of exactly k entries among those that a mask still keeps.

A mask is changed in place, and only once the choice is valid. A first draw drops each survivor whose
random 16-bit integer is at most a threshold, set so that a few too many are dropped; the surplus, drawn uniformly from
the dropped entries, is then spared. Both steps treat all survivors equally, so every subset of size k is equally
likely. The draw depends only on the rank of each survivor, not on strides, dtype or dead entries.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from pruning.selection.smallest import CHUNK, Count, chunks_of, resolved_count, smallest_on_device

SIGMAS = 5.0
"""Surplus of a first draw in standard deviations: one draw in a million falls short, and is repeated."""
FEW = 1 / 64
"""Fraction of survivors to prune up to which their positions are drawn one by one."""


def prune_random_(mask: Tensor, count: Count, *, generator: Generator | None = None) -> Tensor:
    """Set `count` of the surviving (nonzero) entries of `mask` to 0; every subset of that size is equally likely.

    Args:
        mask: any bool or floating dtype, any shape and strides; changed in place.
        count: the exact number of survivors to prune, or a function (number of survivors) -> that number.
        generator: source of all draws; None takes torch's default generator of the mask's device. A CPU generator draws
            on the host for masks on any device, so that the same seed prunes the same entries everywhere.

    Returns:
        `mask`.

    Raises:
        ValueError: `count` is negative or above the number of survivors.
    """
    prune_random_across_([mask], count, generator=generator)
    return mask


def prune_random_across_(masks: Sequence[Tensor], count: Count, *, generator: Generator | None = None) -> None:
    """Prune `count` entries as `prune_random_` does, drawn from the survivors of all masks together."""
    if any(mask.device.type != "cpu" for mask in masks):
        _random_on_device(masks, count, generator)
        return
    chunks = [*chunks_of(masks, masks, [""] * len(masks))]
    survivors = sum(chunk.alive for chunk in chunks)
    if (count := resolved_count(count, survivors)) == 0:
        return
    dropped = _subset(survivors, count, generator)
    rank = 0
    for chunk in chunks:
        end = rank + chunk.alive
        bits = np.unpackbits(dropped[rank >> 3 : (end + 7) >> 3])[rank & 7 :][: chunk.alive]
        chunk.drop_survivors(bits.view(bool))
        rank = end


def _draw(count: int, generator: Generator | None) -> NDArray[np.uint64]:
    """Return `count` uniform 64-bit integers."""
    drawn = torch.empty(count, dtype=torch.int64, device="cpu").random_(-(1 << 63), None, generator=generator)
    return np.asarray(drawn.numpy()).view(np.uint64)


def _subset(size: int, count: int, generator: Generator | None) -> NDArray[np.uint8]:
    """Return `size` packed bits (highest of a byte first) with `count` ones; every such subset is equally likely."""
    bits = np.zeros((size + 7) // 8, np.uint8)
    if count <= FEW * size:
        chosen = _distinct(size, count, generator)
        np.bitwise_or.at(bits, chosen >> 3, (128 >> (chosen & 7)).astype(np.uint8))
        return bits
    fraction = count / size
    surplus = SIGMAS * math.sqrt(size * fraction * (1 - fraction))
    highest = min(0xFFFF, math.ceil((count + surplus) / size * 0x10000) - 1)
    ones = 0
    while ones < count:  # one pass, except once in a million draws
        ones = 0
        for start in range(0, size, CHUNK):
            length = min(CHUNK, size - start)
            chunk = _draw((length + 3) // 4, generator).view(np.uint16)[:length] <= highest
            ones += int(np.count_nonzero(chunk))
            bits[start >> 3 : (start + length + 7) >> 3] = np.packbits(chunk)
    spared = _distinct(size, ones - count, generator, bits)
    np.bitwise_and.at(bits, spared >> 3, (~(128 >> (spared & 7))).astype(np.uint8))
    return bits


def _distinct(
    limit: int, count: int, generator: Generator | None, within: NDArray[np.uint8] | None = None
) -> NDArray[np.int64]:
    """Draw `count` different integers uniformly from [0, limit); with `within`, from those whose bit in it is 1."""
    distinct = np.empty(0, np.int64)
    while distinct.size < count:
        drawn = (_draw((count - distinct.size) * 5 // 4 + 16, generator) % np.uint64(limit)).astype(np.int64)
        if within is not None:
            drawn = drawn[(within[drawn >> 3] & (128 >> (drawn & 7))) != 0]
        distinct = np.concatenate([distinct, drawn])
        # Keeping first occurrences in order equals drawing one by one without replacement.
        distinct = distinct[np.sort(np.unique(distinct, return_index=True)[1])][:count]
    return distinct


def _random_on_device(masks: Sequence[Tensor], count: Count, generator: Generator | None) -> None:
    device = masks[0].device
    if generator is not None and generator.device.type == "cpu":
        kept = [(mask != 0).cpu() for mask in masks]
        prune_random_across_(kept, count, generator=generator)
        for mask, keep in zip(masks, kept, strict=True):
            mask.detach().masked_fill_(~keep.to(device), 0)
        return
    # 63 random bits for each entry: among 10^8 entries, one draw in a thousand holds two equal keys; the lower index
    # is then pruned first.
    keys = [torch.empty(mask.shape, dtype=torch.int64, device=device).random_(generator=generator) for mask in masks]
    smallest_on_device(masks, keys, count, False, [""] * len(masks))
