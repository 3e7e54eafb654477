"""Exact sums over examples: figures depend neither on the order of the examples nor on their batches."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

import torch
from torch import Tensor


class Totals:
    """Exact sums of floats, and integer counts; the totals of two parts of a split add up to the totals of the whole.

    >>> totals = Totals()
    >>> totals.add("loss", torch.tensor([0.5, 0.25]))
    >>> totals.count("examples", 2)
    >>> totals.mean("loss", "examples")
    0.375
    """

    def __init__(self) -> None:
        self._new: dict[str, list[Tensor]] = {}
        self._parts: dict[str, list[tuple[float, ...]]] = {}
        self._counts: dict[str, Tensor] = {}

    def add(self, name: str, values: Tensor) -> None:
        """Add floats to a sum: shape (examples,), or (examples, columns) for one sum per column."""
        self._new.setdefault(name, []).append(values.detach())

    def count(self, name: str, counts: Tensor | int) -> None:
        """Add integers to a count; the shape is the same in each call."""
        found = torch.as_tensor(counts).detach()
        self._counts[name] = self._counts[name] + found if name in self._counts else found

    def counted(self, name: str) -> Tensor:
        """Return a count, on the CPU."""
        return self._counts[name].cpu()

    def has(self, name: str) -> bool:
        """Whether something was added to a sum or a count."""
        return name in self._counts or name in self._new or name in self._parts

    def rate(self, name: str, by: str) -> float:
        """Return a count divided by another; NaN if that is 0."""
        count = int(self.counted(by))
        return int(self.counted(name)) / count if count else math.nan

    def exact(self, name: str) -> list[Fraction] | None:
        """Return the unrounded sum of each column; None if a value is infinite or NaN."""
        parts = [_expansion(column) for column in self._columns(name)]
        if not all(math.isfinite(part) for column in parts for part in column):
            return None
        return [sum(map(Fraction, column), Fraction(0)) for column in parts]

    def mean(self, name: str, by: str) -> float:
        """Return the sum of one column divided by a count, each rounded once; NaN if a value is not finite."""
        (values,), count = self._columns(name), int(self.counted(by))
        return math.fsum(values) / count if count and all(map(math.isfinite, values)) else math.nan

    def __add__(self, other: Totals) -> Totals:
        whole = Totals()
        for each in (self, other):
            for name in each._new.keys() | each._parts.keys():
                columns = each._columns(name)
                held = whole._parts.get(name, [()] * len(columns))
                whole._parts[name] = [_expansion((*a, *b)) for a, b in zip(held, columns, strict=True)]
            for name, counts in each._counts.items():
                whole.count(name, counts.cpu())
        return whole

    def _columns(self, name: str) -> list[tuple[float, ...]]:
        """Return floats for each column that have its exact sum: the added values, or fewer after adding totals."""
        if new := self._new.pop(name, None):
            values = torch.cat(new).double()
            columns = [values.tolist()] if values.ndim == 1 else values.T.tolist()
            held = self._parts.get(name, [()] * len(columns))
            self._parts[name] = [(*parts, *column) for parts, column in zip(held, columns, strict=True)]
        return self._parts[name]


def _expansion(values: Iterable[float]) -> tuple[float, ...]:
    """Return a few floats whose exact sum is that of `values`; (nan,) if a value is not finite."""
    values = tuple(values)
    if not all(map(math.isfinite, values)):
        return (math.nan,)
    parts: list[float] = []
    while rest := math.fsum((*values, *(-part for part in parts))):
        parts.append(rest)
    return tuple(parts) or (0.0,)
