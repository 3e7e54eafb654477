"""Exactly the k smallest of those entries that a mask still keeps.

A mask is changed in place, and only once the choice is complete and valid. On the CPU tensors are read in chunks that
fit a core's cache, with working memory of well under a byte an entry; chunks without survivors are skipped. Elsewhere
(CUDA) the choice is made on the device, with one transfer to the host a call.

A strided sample brackets the threshold, one pass counts what lies outside the bracket and collects the few scores
inside, a partition of those gives the threshold t, and a second pass zeroes what is below t. Scores equal to an end of
the bracket are only counted; where too many lie inside, a part of them brackets the threshold anew. Of several entries
equal to t the lowest flat (row-major) indices go first, in the order of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pruning.selection.chunks import Chunk, array_of, chunks_of

Count: TypeAlias = int | Callable[[int], int]
"""How many survivors to prune, or a function that says so of how many survive (which saves counting them first)."""

SAMPLE = 1 << 16
"""Scores sampled to bracket the threshold; up to as many survivors are ranked without a sample."""
SIGMAS = 5.0
"""Half the width of a bracket in standard deviations: a miss costs a second pass, never the result."""
FEW = 1 / 64
"""Up to this fraction scores are ranked without a sample."""
PASSES = 8
"""Brackets to try; then all that lies within the last is collected, whatever memory that takes."""
ROOM = 1 / 20
"""Of all entries that many scores may be collected; a good bracket holds fewer, and of a bad one they are a sample."""


def prune_smallest_(mask: Tensor, scores: Tensor, count: Count, *, magnitude: bool = False) -> Tensor:
    """Set to 0 the `count` surviving (nonzero) entries of `mask` that have the smallest scores.

    Arguments:
        mask: any bool or floating dtype, any shape and strides; changed in place.
        scores: the shape and device of `mask`, any real dtype and strides.
        count: how many survivors to prune, exactly, under ties too; or a function of how many there are.
        magnitude: rank by absolute value.

    Returns:
        `mask`.

    Raises:
        ValueError: `count` is negative or above the number of survivors, shapes differ, or a survivor's score is NaN.
    """
    prune_smallest_across_([mask], [scores], count, magnitude=magnitude)
    return mask


def prune_smallest_across_(
    masks: Sequence[Tensor],
    scores: Sequence[Tensor],
    count: Count,
    *,
    magnitude: bool = False,
    names: Sequence[str] | None = None,
) -> None:
    """As `prune_smallest_`, with the entries of all tensors ranked as one; `names` of the tensors are for errors."""
    if names is None:
        names = ["scores"] if len(masks) == 1 else [f"scores[{i}]" for i in range(len(masks))]
    for name, mask, score in zip(names, masks, scores, strict=True):
        if mask.shape != score.shape:
            raise ValueError(f"`{name}` of shape {tuple(score.shape)} must have its mask's shape {tuple(mask.shape)}.")
    scores = [score.detach() for score in scores]
    if any(mask.device.type != "cpu" for mask in masks):
        smallest_on_device(masks, scores, count, magnitude, names)
        return
    chunks = [*chunks_of(masks, scores, names)]
    survivors = sum(chunk.alive for chunk in chunks)
    if (count := resolved_count(count, survivors)) == 0:
        return
    threshold, ties = _threshold(chunks, survivors, count, magnitude)
    for chunk in chunks:
        if chunk.alive:
            ties -= chunk.drop_below(threshold, ties, magnitude)


def resolved_count(count: Count, survivors: int) -> int:
    """Return how many of `survivors` to prune; raise `ValueError` for a number that is out of range."""
    number = count(survivors) if callable(count) else count
    if not 0 <= number <= survivors:
        raise ValueError(f"`count` (={number}) must lie in [0, {survivors}]: so many entries are still unpruned.")
    return number


def _threshold(chunks: Sequence[Chunk], survivors: int, count: int, magnitude: bool) -> tuple[Any, int]:
    """Return the `count`-th smallest surviving score, and how many of the entries equal to it are to go."""
    entries = sum(chunk.mask.numel() for chunk in chunks)
    outer = low, high = (-math.inf, math.inf)
    if survivors > max(SAMPLE, FEW * entries):
        low, high = _bracket(_sample(chunks, survivors, magnitude), count / survivors, outer)
    passes = 0
    while True:
        limit = max(SAMPLE, int(ROOM * entries)) if passes < PASSES else entries
        counts = _look(chunks, low, high, magnitude, limit)
        passes += 1
        rank = count - counts.below
        if rank <= 0:  # the sample was not like the rest
            outer = low, high = outer[0], low
        elif rank <= counts.at_low:
            return low, rank
        elif (rank := rank - counts.at_low) > counts.between:
            if (rank := rank - counts.between) <= counts.at_high:
                return high, rank
            outer = low, high = high, outer[1]
        elif counts.between > counts.scores.size:
            outer = low, high
            low, high = _bracket(counts.scores, rank / counts.between, outer)
        else:
            counts.scores.partition(rank - 1)
            threshold = counts.scores[rank - 1]
            return threshold, rank - int(np.count_nonzero(counts.scores < threshold))


def _sample(chunks: Sequence[Chunk], survivors: int, magnitude: bool) -> NDArray[Any]:
    """Return some `SAMPLE` surviving scores."""
    stride = max(1, survivors // SAMPLE)
    sampled = []
    for number, chunk in enumerate(chunks):
        if chunk.alive:
            # The sample starts elsewhere in each chunk, or it would see only some of a matrix's columns.
            start = number * 40503 % stride
            if chunk.index is not None:
                sampled.append(array_of(chunk.scores, chunk.index[start::stride]))
                continue
            scores = array_of(chunk.scores)
            if chunk.alive == scores.size:
                sampled.append(scores[start::stride])
            else:
                sampled.append(scores[start::stride][array_of(chunk.mask)[start::stride] != 0])
    sample = np.concatenate(sampled)
    return np.abs(sample) if magnitude else sample


def _bracket(sample: NDArray[Any], fraction: float, outer: tuple[Any, Any]) -> tuple[Any, Any]:
    """Return two scores within `outer` that almost surely enclose the lowest `fraction` of what was sampled."""
    sample = np.sort(sample)
    rank = fraction * sample.size
    margin = SIGMAS * math.sqrt(sample.size * fraction * (1 - fraction)) + 2
    low, high = math.floor(rank - margin), math.ceil(rank + margin)
    return (sample[low] if low >= 0 else outer[0]), (sample[high] if high < sample.size else outer[1])


class _Counts(NamedTuple):
    """How many surviving scores lie where; and those strictly between, or an evenly spaced part of them."""

    below: int
    at_low: int
    between: int
    at_high: int
    scores: NDArray[Any]


def _look(chunks: Sequence[Chunk], low: Any, high: Any, magnitude: bool, limit: int) -> _Counts:
    """Count the survivors below, at and between two scores, and collect at most `limit` of those between."""
    below = at_low = between = at_high = kept = 0
    stride = 1
    collected: list[NDArray[Any]] = []
    for chunk in chunks:
        if chunk.alive:
            keys, alive = chunk.keys(magnitude)
            under = keys < low
            # Neither below nor above: what lies inside or at an end, and NaN.
            inside = under == (keys > high)
            if alive is not None:
                under &= alive
                inside &= alive
            below += int(np.count_nonzero(under))
            within = keys[inside]
            if np.isnan(within).any():
                raise ValueError(
                    f"`{chunk.name}` holds NaN where the mask keeps an entry; mend the tensor or mask those entries."
                )
            # Ends are counted, not collected: of many equal scores one is an end.
            lows, highs = within == low, within == high
            ends = lows | highs
            if ends.any():
                at_low += int(np.count_nonzero(lows))
                at_high += 0 if low == high else int(np.count_nonzero(highs))
                within = within[~ends]
            collected.append(within[-between % stride :: stride].copy())
            between += within.size
            kept += collected[-1].size
            while kept > limit:
                start = 0
                for number, piece in enumerate(collected):
                    collected[number] = piece[start % 2 :: 2].copy()
                    start += piece.size
                kept, stride = (kept + 1) // 2, 2 * stride
    return _Counts(below, at_low, between, at_high, np.concatenate(collected))


def smallest_on_device(
    masks: Sequence[Tensor], scores: Sequence[Tensor], count: Count, magnitude: bool, names: Sequence[str]
) -> None:
    """Do the same on a device other than the CPU, by sorting."""
    keys = torch.cat([score.reshape(-1) for score in scores])
    keys = keys.abs() if magnitude else keys
    alive = torch.cat([mask.detach().reshape(-1) for mask in masks]) != 0
    survivors, undefined = torch.stack([alive.sum(), (keys.isnan() & alive).sum()]).tolist()
    count = resolved_count(count, survivors)
    if undefined:
        bad = [
            name for name, mask, score in zip(names, masks, scores, strict=True) if (score.isnan() & (mask != 0)).any()
        ]
        raise ValueError(f"`{bad[0]}` holds NaN where the mask keeps an entry; mend the tensor or mask those entries.")
    if count == 0:
        return
    drop = ~best_of_pools(keys[None], alive[None], survivors - count)[0]
    for mask, part in zip(masks, torch.split(drop, [mask.numel() for mask in masks]), strict=True):
        mask.detach().masked_fill_(part.view(mask.shape), 0)


def best_of_pools(scores: Tensor, alive: Tensor, count: int) -> Tensor:
    """Return which entries are among the `count` best survivors of their pool; of equal scores the higher indices are.

    Args:
        scores: (pools, entries), without NaN where an entry is alive; on any device.
        alive: (pools, entries), bool.
        count: of each pool; one in which fewer survive keeps these.
    """
    # By score, then the dead before the living: both sorts keep the order of the indices. `kthvalue` is refused on CUDA
    # under deterministic algorithms, a sort never is.
    order = scores.sort(dim=1, stable=True).indices
    order = order.gather(1, alive.gather(1, order).to(torch.uint8).sort(dim=1, stable=True).indices)
    best = torch.zeros_like(alive).scatter_(1, order[:, alive.shape[1] - count :], True)
    return best & alive
