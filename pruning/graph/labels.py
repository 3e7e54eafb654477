"""Names for positions along dimensions, and which of them stand or fall together.

Every position along a dimension of a parameter has a label, an int; 0 is of what always stays. A tensor has fields:
arrays of labels with as many dimensions as it, 1 where a label holds for all positions of a dimension. A position of a
tensor is left in place when all of its labels are kept. What no field covers stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from dataclasses import field as made
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

Fields: TypeAlias = list[Tensor]
"""Of one tensor: int64, disjoint in the dimensions that they cover (but for weights of grouped convolutions)."""

FIXED = 0
"""The label of positions that always stay."""

ONLY_ONE = "it is the only one"
"""Why the one position of a dimension of size 1 stays."""


class Labels:
    """The labels given out so far, which of them are tied to each other, and which are asked for from outside."""

    def __init__(self) -> None:
        self._parent: NDArray[np.int64] = np.zeros(1, np.int64)
        self.pins: list[tuple[Tensor, str]] = []

    def __len__(self) -> int:
        return len(self._parent)

    def fresh(self, count: int) -> Tensor:
        """Return `count` new labels, shape (count,)."""
        first = len(self._parent)
        self._parent = np.concatenate([self._parent, np.arange(first, first + count)])
        return torch.arange(first, first + count)

    def roots(self, labels: Tensor) -> Tensor:
        """Return for each label the one that stands for all that are tied to it."""
        found = labels.numpy()
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                return torch.from_numpy(np.ascontiguousarray(above)).reshape(labels.shape)
            found = above

    def tie(self, one: Tensor, other: Tensor, because: str) -> None:
        """Let labels at the same place of two arrays that broadcast stand or fall together; those at `FIXED` stay."""
        one, other = torch.broadcast_tensors(one, other)  # type: ignore[no-untyped-call]
        fixed = (one == FIXED) | (other == FIXED)
        if fixed.any():
            self.pin(torch.cat([one[fixed], other[fixed]]), because)
        one, other = one[~fixed], other[~fixed]
        while True:
            a, b = self.roots(one).numpy(), self.roots(other).numpy()
            low, high = np.minimum(a, b), np.maximum(a, b)
            if np.array_equal(low, high):
                self._parent = self.roots(torch.arange(len(self._parent))).numpy().copy()
                return
            np.minimum.at(self._parent, high, low)

    def pin(self, labels: Tensor, because: str) -> None:
        """Keep these labels."""
        labels = torch.from_numpy(np.unique(labels[labels != FIXED].numpy()))
        if len(labels):
            self.pins.append((labels, because))

    def packed(self, fields: Sequence[Tensor], because: str) -> Fields:
        """Return fields without dimensions along which they do not differ; of two that meet, none is kept free."""
        packed = []
        for field in fields:
            roots = self.roots(field)
            for dim in range(field.ndim):
                if field.shape[dim] > 1 and bool((roots == roots.narrow(dim, 0, 1)).all()):
                    field, roots = field.narrow(dim, 0, 1), roots.narrow(dim, 0, 1)
            if covered(field):
                packed.append(field)
            else:
                self.pin(field.flatten(), because)
        meeting = [
            field for field in packed if any(other is not field and covered(other) & covered(field) for other in packed)
        ]
        for field in meeting:
            self.pin(field.flatten(), because)
        return [field for field in packed if not any(field is each for each in meeting)]


def covered(field: Tensor) -> set[int]:
    """Return the dimensions along which a field differs."""
    return {dim for dim, size in enumerate(field.shape) if size > 1}


def covering(fields: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return the field that covers a dimension, None if there is none."""
    return next((field for field in fields if field.shape[dim] > 1), None)


def along(labels: Tensor, dim: int, ndim: int) -> Tensor:
    """Return labels of one dimension, shape (n,), as a field of a tensor with `ndim` dimensions."""
    shape = [1] * ndim
    shape[dim] = len(labels)
    return labels.reshape(shape)


@dataclass(frozen=True)
class Site:
    """An operation that makes each output of several inputs.

    Args:
        node: of the graph.
        inputs: the label of each input, shape (inputs,).
        outputs: the label of each output, shape (outputs,).
        reads: (outputs, inputs) whether an output depends on an input; None: each on each.
        constant: what each input holds where that may be left out and added to the bias, else NaN; shape (inputs,).
        because: why an input is kept that an output reads.
        bordered: where an input is a constant that zeros around it, here or before, make uneven; shape (inputs,).
        weight, bias: nodes of the parameters that a constant is multiplied by and added to.
    """

    node: fx.Node
    inputs: Tensor
    outputs: Tensor
    reads: Tensor | None
    constant: Tensor
    because: str
    bordered: Tensor | None = None
    weight: fx.Node | None = None
    bias: fx.Node | None = None


@dataclass
class Shapes:
    """What must hold of the labels that are kept, so that what is left are tensors again.

    Args:
        grids: labels with several dimensions: along each, as many are kept wherever any are.
        same: (one, other), both of shape (n, any): row i of one keeps something exactly where row i of the other does.
    """

    grids: list[Tensor] = made(default_factory=list)
    same: list[tuple[Tensor, Tensor]] = made(default_factory=list)
