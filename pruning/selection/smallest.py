"""Exact selection of the k smallest entries among those that a mask still keeps.

A mask is changed in place, and only once the choice is complete and valid. On the CPU, tensors are read in chunks that
fit a core's cache, with well under one byte of working memory per entry; chunks without survivors are skipped. On other
devices (CUDA) the choice is made on the device, with one transfer to the host per call.

On the CPU, a strided sample gives a bracket around the threshold. A first pass counts the scores outside the bracket
and collects the few inside; a partition of these gives the threshold t. A second pass zeroes the entries below t.
Scores equal to an end of the bracket are only counted; if too many lie inside, a part of them gives a narrower bracket
for another pass. Among entries equal to t, those with the lowest flat (row-major) index are pruned first, in the
order of the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

CHUNK = 1 << 16
"""Entries read at a time."""
SPARSE = 1 / 32
"""Fraction of survivors up to which a chunk stores their positions and scores, and skips its other entries."""

Array = NDArray[Any]


@dataclass(slots=True)
class Chunk:
    """Consecutive entries of a mask and of its scores, in row-major order."""

    mask: Tensor
    scores: Tensor
    name: str
    index: Array | None = None
    """Positions of the survivors if they are few, else None."""
    alive: int = 0
    """Number of survivors."""
    gathered: Array | None = None
    """Ranking keys of few survivors, cached by `keys`."""

    def __post_init__(self) -> None:
        """Count the survivors, and store their positions if they are few."""
        alive = array_of(self.mask) != 0
        self.alive = int(np.count_nonzero(alive))
        if self.alive <= SPARSE * alive.size:
            self.index = np.flatnonzero(alive).astype(np.int32)

    def keys(self, magnitude: bool) -> tuple[Array, Array | None]:
        """Return the ranking keys and a bool array of the survivors among them (None: all survive)."""
        if self.index is None:
            keys = array_of(self.scores)
            alive = None if self.alive == keys.size else array_of(self.mask) != 0
            return (np.abs(keys) if magnitude else keys), alive
        if self.gathered is None:
            keys = array_of(self.scores, self.index)
            self.gathered = np.abs(keys) if magnitude else keys
        return self.gathered, None

    def drop_below(self, threshold: Any, ties: int, magnitude: bool) -> int:
        """Zero the entries below `threshold` and the first `ties` equal to it; return the number of the latter."""
        keys, alive = self.keys(magnitude)
        keep = keys >= threshold
        equal: Array = np.empty(0, np.intp)
        if ties:
            at = keys == threshold
            equal = np.flatnonzero(at if alive is None else at & alive)[:ties]
            keep[equal] = False
        if self.index is None:
            self.keep(keep)
        else:
            self.drop(~keep)
        return equal.size

    def drop_survivors(self, dropped: Array) -> None:
        """Zero the survivors where the bool array `dropped`, shape (survivors,), is True."""
        if self.index is not None:
            self.drop(dropped)
        elif self.alive == self.mask.numel():
            self.keep(~dropped)
        else:
            keep = np.ones(self.mask.numel(), bool)
            keep[np.flatnonzero(array_of(self.mask) != 0)] = ~dropped  # five times as fast as indexing by a bool mask
            self.keep(keep)

    def drop(self, dropped: Array) -> None:
        """Zero the survivors where the bool array `dropped` is True; `index` must be set."""
        assert self.index is not None
        positions = self.index[dropped].astype(np.int64)
        if self.mask.is_contiguous():
            self.mask.view(-1).index_fill_(0, torch.from_numpy(positions), 0)
        else:
            keep = np.ones(self.mask.numel(), bool)
            keep[positions] = False
            self.keep(keep)

    def keep(self, keep: Array) -> None:
        """Zero the mask wherever the bool array `keep` is False."""
        # Multiplying by 0 and 1 in the mask's dtype is three times as fast as filling under a bool mask.
        factor = torch.from_numpy(keep.view(np.uint8)).view(self.mask.shape)
        self.mask.mul_(factor.to(self.mask.dtype))


def chunks_of(masks: Sequence[Tensor], scores: Sequence[Tensor], names: Sequence[str]) -> Iterator[Chunk]:
    """Cut all tensors into chunks."""
    for mask, score, name in zip(masks, scores, names, strict=True):
        if mask.numel() == 0:
            continue
        mask = mask.detach()
        if mask.is_contiguous() and score.is_contiguous():
            mask, score = mask.view(-1), score.view(-1)
        rows = max(1, CHUNK * mask.shape[0] // mask.numel())
        for piece, ranked in zip(mask.split(rows), score.split(rows), strict=True):  # type: ignore[no-untyped-call]
            yield Chunk(piece, ranked, name)


def array_of(tensor: Tensor, positions: Array | None = None) -> Array:
    """Return the entries in row-major order (or those at `positions`), as float32 where NumPy lacks the dtype."""
    if tensor.is_floating_point() and tensor.element_size() < 4:
        if positions is not None:
            tensor, positions = tensor.reshape(-1).index_select(0, torch.from_numpy(positions)), None
        tensor = tensor.float()
    entries = tensor.reshape(-1).numpy()
    return entries if positions is None else entries[positions]


Count: TypeAlias = int | Callable[[int], int]
"""Number of survivors to prune, or a function (number of survivors) -> that number, which saves counting them first."""

SAMPLE = 1 << 16
"""Scores sampled to bracket the threshold; up to this many survivors are ranked without a sample."""
SIGMAS = 5.0
"""Half the width of a bracket in standard deviations; a bracket that misses costs another pass, not exactness."""
FEW = 1 / 64
"""Fraction of survivors among all entries up to which they are ranked without a sample."""
NARROW = 8
"""Largest pool whose entries are compared in pairs, which takes a tenth of the time of two sorts."""
PASSES = 8
"""Number of brackets to try before all scores within the last one are collected, whatever memory that takes."""
ROOM = 1 / 20
"""Fraction of all entries whose scores may be collected; of a bracket that holds more, a sample is collected."""


def prune_smallest_(mask: Tensor, scores: Tensor, count: Count, *, magnitude: bool = False) -> Tensor:
    """Set the `count` surviving (nonzero) entries of `mask` with the smallest scores to 0.

    Args:
        mask: any bool or floating dtype, any shape and strides; changed in place.
        scores: the shape and device of `mask`, any real dtype and strides.
        count: the number of survivors to prune, exact also under ties; or a function (number of survivors) -> it.
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
    """Prune `count` entries as `prune_smallest_` does, ranking all tensors together; `names` are for error messages."""
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
    """Return how many of `survivors` to prune; raise `ValueError` if that is out of range."""
    number = count(survivors) if callable(count) else count
    if not 0 <= number <= survivors:
        raise ValueError(f"`count` (={number}) must lie in [0, {survivors}]; {survivors} entries are still unpruned.")
    return number


def _threshold(chunks: Sequence[Chunk], survivors: int, count: int, magnitude: bool) -> tuple[Any, int]:
    """Return the `count`-th smallest surviving score, and how many of the entries equal to it to prune."""
    entries = sum(chunk.mask.numel() for chunk in chunks)
    outer = low, high = (-math.inf, math.inf)
    if survivors > max(SAMPLE, FEW * entries):
        low, high = _bracket(_sample(chunks, survivors, magnitude), count / survivors, outer)
    passes = 0
    while True:
        limit = max(SAMPLE, int(ROOM * entries)) if passes < PASSES else entries
        counts = _count_around(chunks, low, high, magnitude, limit)
        passes += 1
        rank = count - counts.below
        if rank <= 0:  # the bracket lies above the threshold
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
    """Return a strided sample of about `SAMPLE` surviving scores."""
    stride = max(1, survivors // SAMPLE)
    sampled = []
    for number, chunk in enumerate(chunks):
        if chunk.alive:
            # Each chunk starts at another offset; with one offset, the sample could miss columns of a matrix.
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
    """Return two scores that almost surely bracket the quantile `fraction`; an end of `outer` where the sample ends."""
    sample = np.sort(sample)
    rank = fraction * sample.size
    margin = SIGMAS * math.sqrt(sample.size * fraction * (1 - fraction)) + 2
    low, high = math.floor(rank - margin), math.ceil(rank + margin)
    return (sample[low] if low >= 0 else outer[0]), (sample[high] if high < sample.size else outer[1])


class _Counts(NamedTuple):
    """Counts of surviving scores relative to a bracket; `scores` are those between, or a spaced part of them."""

    below: int
    at_low: int
    between: int
    at_high: int
    scores: NDArray[Any]


def _count_around(chunks: Sequence[Chunk], low: Any, high: Any, magnitude: bool, limit: int) -> _Counts:
    """Count the survivors below, at and between two scores, and collect at most `limit` of the scores between."""
    below = at_low = between = at_high = kept = 0
    stride = 1
    collected: list[NDArray[Any]] = []
    for chunk in chunks:
        if chunk.alive:
            keys, alive = chunk.keys(magnitude)
            under = keys < low
            # Neither below nor above: scores inside the bracket or at an end, and NaN.
            inside = under == (keys > high)
            if alive is not None:
                under &= alive
                inside &= alive
            below += int(np.count_nonzero(under))
            within = keys[inside]
            if np.isnan(within).any():
                raise ValueError(
                    f"`{chunk.name}` holds NaN where the mask keeps an entry; repair the tensor or mask those entries."
                )
            # Scores equal to an end are counted, not collected: a value of many equal scores becomes an end.
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
    """Prune the `count` smallest entries of all masks on a device other than the CPU, by sorting."""
    keys = torch.cat([score.reshape(-1) for score in scores])
    keys = keys.abs() if magnitude else keys
    alive = torch.cat([mask.detach().reshape(-1) for mask in masks]) != 0
    survivors, undefined = torch.stack([alive.sum(), (keys.isnan() & alive).sum()]).tolist()
    count = resolved_count(count, survivors)
    if undefined:
        bad = [
            name for name, mask, score in zip(names, masks, scores, strict=True) if (score.isnan() & (mask != 0)).any()
        ]
        raise ValueError(
            f"`{bad[0]}` holds NaN where the mask keeps an entry; repair the tensor or mask those entries."
        )
    if count == 0:
        return
    drop = ~best_of_pools(keys[None], alive[None], survivors - count)[0]
    for mask, part in zip(masks, torch.split(drop, [mask.numel() for mask in masks]), strict=True):
        mask.detach().masked_fill_(part.view(mask.shape), 0)


def best_of_pools(scores: Tensor, alive: Tensor, count: int | Tensor) -> Tensor:
    """Return a bool for each entry: whether it is among the `count` best survivors of its pool.

    Ties go to the entries with higher indices.

    Args:
        scores: (pools, entries), without NaN where an entry is alive; on any device.
        alive: (pools, entries), bool.
        count: number of entries that each pool keeps, for all pools or shape (pools,); a pool with fewer survivors
            keeps them all.
    """
    if alive.shape[1] <= NARROW and bool(alive.all()):
        return _best_of_narrow_pools(scores, count)
    # Sort by score, then put dead entries first; both sorts are stable in the indices. On CUDA, deterministic
    # algorithms refuse `kthvalue` but not a sort.
    order = scores.sort(dim=1, stable=True).indices
    order = order.gather(1, alive.gather(1, order).to(torch.uint8).sort(dim=1, stable=True).indices)
    if isinstance(count, int):
        best = torch.zeros_like(alive).scatter_(1, order[:, alive.shape[1] - count :], True)
    else:
        places = torch.arange(alive.shape[1], device=alive.device)
        best = torch.zeros_like(alive).scatter_(1, order, places >= alive.shape[1] - count[:, None])
    return best & alive


def _best_of_narrow_pools(scores: Tensor, count: int | Tensor) -> Tensor:
    """Return the result of `best_of_pools` for pools whose entries are all alive, by comparing each pair."""
    columns = scores.unbind(1)
    rank = [torch.zeros_like(columns[0], dtype=torch.uint8) for _ in columns]
    for later in range(len(columns)):
        for earlier in range(later):
            is_higher = columns[later] >= columns[earlier]
            rank[later] += is_higher
            rank[earlier] += ~is_higher
    return torch.stack([each >= len(columns) - count for each in rank], dim=1)
