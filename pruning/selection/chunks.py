"""Chunks of masks and scores on the CPU that fit a core's second-level cache.

NumPy compares, counts and compresses several times as fast as torch on one core, so chunks are read through NumPy views
of their memory (half precision is converted to float32 chunk by chunk) and written through torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

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
