"""What is known of masks of which only few entries, or only whole rows, survive: work on them is then theirs alone.

A note belongs to one mask as it was when the note was taken. It is lost once torch writes the mask, and a copy of the
mask has none. What writes behind torch's back (`.data`, NumPy, another process) `verify` finds in one fast pass.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pruning import memory

AT_ONCE = 1 << 16
"""Entries moved at a time, to stay in a core's second-level cache."""
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Array = NDArray[Any]
Stamp: TypeAlias = tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Survivors:
    """The rows of `mask.view(-1, width)` that survive whole, all others being pruned; `width` 1 means entries."""

    rows: Array
    width: int = 1

    def copied_from(self, tensor: Tensor) -> Tensor:
        """Return a new tensor that holds these entries of `tensor`, which is contiguous, and zeros elsewhere."""
        copy = memory.zeros_like(tensor)
        source, bits = self._bits(tensor), self._bits(copy)
        for rows in self._parts():
            bits[rows] = source[rows]
        return copy

    def copied_into(self, copy: Tensor, tensor: Tensor, before: Survivors) -> Tensor:
        """Write the same into `copy`, which holds zeros wherever `before` has no entries; return it."""
        source, bits = self._bits(tensor), self._bits(copy)
        before._bits(copy)[before.rows] = 0
        for rows in self._parts():
            bits[rows] = source[rows]
        return copy

    def fill_(self, mask: Tensor) -> Tensor:
        """Set these entries of `mask` to 1."""
        bits, one = self._bits(mask), _bits_of_one(mask)
        for rows in self._parts():
            bits[rows] = one
        return mask

    def are_those_of(self, mask: Tensor) -> bool:
        """Say whether just these entries of `mask` are 1 and all others 0."""
        bits = self._bits(mask)
        found = int(torch.count_nonzero(torch.from_numpy(bits)))  # of integers: twice as fast as of floats
        return found == self.rows.size * self.width and all(
            (bits[rows] == _bits_of_one(mask)).all() for rows in self._parts()
        )

    def _bits(self, tensor: Tensor) -> Array:
        # Integers of the same size: moved as they are, and NumPy has no bfloat16.
        integers: Array = tensor.detach().view(_INTEGERS[tensor.element_size()]).numpy()
        return integers.reshape(-1) if self.width == 1 else integers.reshape(-1, self.width)

    def _parts(self) -> Iterator[Array]:
        step = max(1, AT_ONCE // self.width)
        return (self.rows[start : start + step] for start in range(0, self.rows.size, step))


def _bits_of_one(mask: Tensor) -> int:
    return int(torch.ones((), dtype=mask.dtype, device="cpu").view(_INTEGERS[mask.element_size()]))


@dataclass(frozen=True, slots=True)
class _Note:
    survivors: Survivors
    stamp: Stamp
    before: Stamp
    dropped: Array | None


_notes: MutableMapping[Tensor, _Note] = WeakIdKeyDictionary()  # by mask; weak, so that a note ends with its mask


def stamp(mask: Tensor) -> Stamp:
    """Return what changes when torch writes `mask` or gives it other memory; nothing in inference mode."""
    return None if mask.is_inference() else (mask._version, mask.data_ptr())


def note(mask: Tensor, known: Survivors, before: Stamp = None, dropped: Array | None = None) -> None:
    """Remember that `known` are the survivors of `mask`, if it is large and contiguous.

    `dropped` are the entries that survived, too, when the mask had the stamp `before`.
    """
    if memory.is_large(mask) and mask.is_contiguous() and (now := stamp(mask)) is not None:
        _notes[mask] = _Note(known, now, before, dropped)


def recall(mask: Tensor) -> Survivors | None:
    """Return what is known of `mask`, unless torch has written it since."""
    found = _notes.get(mask)
    return found.survivors if found is not None and found.stamp == stamp(mask) else None


def dropped_since(mask: Tensor, before: Stamp) -> Array | None:
    """Return the few entries of `mask` that were pruned since it had the stamp `before`, if that is known."""
    found = _notes.get(mask)
    if found is None or before is None or found.stamp != stamp(mask) or found.before != before:
        return None
    return found.dropped


def verify(mask: Tensor) -> Survivors | None:
    """Return what is known of `mask` if it holds still, and forget it if not."""
    known = recall(mask)
    if known is not None and known.are_those_of(mask):
        return known
    _notes.pop(mask, None)
    return None


def new_mask(like: Tensor, known: Survivors) -> Tensor:
    """Return a new mask of which `known` survive, of the shape and dtype of the contiguous `like`."""
    mask = known.fill_(memory.zeros_like(like))
    note(mask, known)
    return mask
