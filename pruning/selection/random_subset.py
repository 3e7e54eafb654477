"""Exactly k at random of those entries that a mask still keeps.

As in `smallest`, a mask is changed in place, once the choice is valid. Each survivor is dropped when a random
integer of 16 bits is below a threshold that drops a few too many; as many of the dropped as are too many, drawn
uniformly, are spared. Both steps treat all survivors alike, so every subset of the size asked for is equally likely.
Survivors are known by their rank alone: strides, dtype and dead entries have no say in the draw.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Generator, Tensor

from pruning.selection.chunks import CHUNK, chunks_of
from pruning.selection.smallest import Count, resolved_count, smallest_on_device

SIGMAS = 5.0
"""Surplus of a first draw in standard deviations: it falls short once in a million times, and is then repeated."""
FEW = 1 / 64
"""Up to this fraction positions are drawn singly."""


def prune_random_(mask: Tensor, count: Count, *, generator: Generator | None = None) -> Tensor:
    """Set to 0 `count` of the surviving (nonzero) entries of `mask`, every subset of that size equally likely.

    Arguments:
        mask: any bool or floating dtype, any shape and strides; changed in place.
        count: how many survivors to prune, exactly; or a function of how many there are.
        generator: where all draws come from; by default torch's own of the mask's device. With a CPU generator a
            mask on another device is drawn on the host, so that the same seed prunes the same entries everywhere.

    Returns:
        `mask`.

    Raises:
        ValueError: `count` is negative or above the number of survivors.
    """
    prune_random_across_([mask], count, generator=generator)
    return mask


def prune_random_across_(masks: Sequence[Tensor], count: Count, *, generator: Generator | None = None) -> None:
    """As `prune_random_`, with the entries of all tensors drawn from as one."""
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
    """Return `size` bits (the first is a byte's highest) of which `count` are 1, every such set equally likely."""
    bits = np.zeros((size + 7) // 8, np.uint8)
    if count <= FEW * size:
        chosen = _distinct(size, count, generator)
        np.bitwise_or.at(bits, chosen >> 3, (128 >> (chosen & 7)).astype(np.uint8))
        return bits
    fraction = count / size
    surplus = SIGMAS * math.sqrt(size * fraction * (1 - fraction))
    highest = min(0xFFFF, math.ceil((count + surplus) / size * 0x10000) - 1)
    ones = 0
    while ones < count:  # once, but for one time in a million
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
    """Return `count` different integers of [0, limit), uniformly; with `within`, of those whose bit in it is 1."""
    distinct = np.empty(0, np.int64)
    while distinct.size < count:
        drawn = (_draw((count - distinct.size) * 5 // 4 + 16, generator) % np.uint64(limit)).astype(np.int64)
        if within is not None:
            drawn = drawn[(within[drawn >> 3] & (128 >> (drawn & 7))) != 0]
        distinct = np.concatenate([distinct, drawn])
        # The first occurrence of each: what drawing one after the other, without replacement, would give.
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
    # 63 random bits an entry: two of 10^8 are equal once in a thousand draws, and then the lower index goes.
    keys = [torch.empty(mask.shape, dtype=torch.int64, device=device).random_(generator=generator) for mask in masks]
    smallest_on_device(masks, keys, count, False, [""] * len(masks))
