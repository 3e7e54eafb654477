"""Shares of a batch: the consecutive examples of each batch that one of several processes reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

Items = TypeVar("Items", Tensor, list[Any])


class Part(NamedTuple):
    """A process's share of a batch."""

    batch: Any
    counts: bool
    """Whether the batch holds examples of the share; otherwise one example stands in, so that every process takes the
    same steps."""


@dataclass(frozen=True)
class Share:
    """Share of process `rank` of `size`: of n examples, each process has n // size, and the first n % size one more."""

    rank: int
    size: int

    def bounds(self, length: int) -> tuple[int, int]:
        """Return the first example of the share in a batch of `length`, and the one after its last."""
        least, more = divmod(length, self.size)
        begin = self.rank * least + min(self.rank, more)
        return begin, begin + least + (self.rank < more)

    def of(self, items: Items) -> Items:
        """Return the share of some items; the first item stands in for an empty share."""
        begin, end = self.bounds(len(items))
        return items[begin:end] if end > begin else items[:1]

    def counts(self, length: int) -> bool:
        """Whether the share of a batch of `length` has an example."""
        begin, end = self.bounds(length)
        return end > begin
