"""Labels of positions along dimensions, and ties between labels that are kept or removed together.

Every position along a dimension of a parameter has a label, an int; label 0 means that the position is always kept. A
tensor has fields. A field is an array of labels with the tensor's number of dimensions; it has size 1 in a dimension
where one label holds for all positions. An entry of the tensor is kept if all of its labels are kept. Dimensions that
no field covers stay whole.
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
"""Fields of one tensor: int64; they cover disjoint dimensions, except in weights of grouped convolutions."""

FIXED = 0
"""Label of positions that are always kept."""

ONLY_ONE = "it is the only one"
"""Reason for keeping the only position of a dimension of size 1."""


class Labels:
    """Labels made so far, the ties between them, and the pins: labels that must be kept, with the reason."""

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
        """Return the root of each label: the one label that represents all labels tied together."""
        found = labels.numpy()
        while True:
            above = self._parent[found]
            if np.array_equal(above, found):
                return torch.from_numpy(np.ascontiguousarray(above)).reshape(labels.shape)
            found = above

    def tie(self, one: Tensor, other: Tensor, because: str) -> None:
        """Tie labels at equal places of two arrays that broadcast; a label that meets `FIXED` is pinned."""
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
        """Mark labels that must be kept, with the reason."""
        labels = torch.from_numpy(np.unique(labels[labels != FIXED].numpy()))
        if len(labels):
            self.pins.append((labels, because))

    def packed(self, fields: Sequence[Tensor], because: str) -> Fields:
        """Return fields reduced to the dimensions along which their labels differ.

        Fields that cover no dimension, and fields that share a dimension with another field, are pinned and dropped.
        """
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
    """Return the dimensions in which a field is larger than 1."""
    return {dim for dim, size in enumerate(field.shape) if size > 1}


def covering(fields: Sequence[Tensor], dim: int) -> Tensor | None:
    """Return the field that covers a dimension, None if there is none."""
    return next((field for field in fields if field.shape[dim] > 1), None)


def along(labels: Tensor, dim: int, ndim: int) -> Tensor:
    """Reshape the labels of one dimension, shape (n,), to a field of a tensor with `ndim` dimensions."""
    shape = [1] * ndim
    shape[dim] = len(labels)
    return labels.reshape(shape)


@dataclass(frozen=True)
class Site:
    """Operation that computes each output from several inputs.

    Args:
        node: the operation in the graph.
        inputs: label of each input, shape (inputs,).
        outputs: label of each output, shape (outputs,).
        reads: bool, shape (outputs, inputs): whether an output depends on an input; None: on every input.
        constant: value of each constant input that can be removed and added to the bias, else NaN; shape (inputs,).
        because: reason for keeping an input that a kept output reads.
        bordered: bool, shape (inputs,): the input is a constant whose border differs because of zero padding, in this
            operation or an earlier one.
        weight, bias: nodes of the parameters by which a removed constant is multiplied and to which it is added.
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
    """Constraints on the kept labels, so that the remaining entries still form tensors.

    Args:
        grids: arrays of labels; in each dimension, all slices that keep anything keep the same number of labels.
        same: pairs (one, other), both of shape (n, any): row i of `one` keeps a label if and only if row i of `other`
            does.
    """

    grids: list[Tensor] = made(default_factory=list)
    same: list[tuple[Tensor, Tensor]] = made(default_factory=list)
