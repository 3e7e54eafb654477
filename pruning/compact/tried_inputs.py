"""Inputs of other sizes, layouts, dtypes, ranks and flags than an example's, on which networks are compared."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pruning.measure.macs import Inputs

SMALL = 2**16
"""Number of entries of an input up to which double sizes are tried."""


@dataclass(frozen=True)
class Axis:
    """Dimensions of inputs whose sizes change together.

    Args:
        inner: False: the first dimension of each input; True: all others that have this size.
        size: their size in the example.
    """

    inner: bool
    size: int

    def dims(self, leaf: Any) -> list[int]:
        """Return the dimensions of an input that belong to it."""
        if not isinstance(leaf, Tensor):
            return []
        dims = range(1, leaf.ndim) if self.inner else range(min(leaf.ndim, 1))
        return [dim for dim in dims if leaf.shape[dim] == self.size]

    def resized(self, given: Inputs, new: int) -> Inputs:
        """Return inputs with a new size, whose entries repeat."""
        places = torch.arange(new) % self.size

        def change(leaf: Any) -> Any:
            for dim in self.dims(leaf):
                leaf = leaf.index_select(dim, places)
            return leaf

        found: Inputs = tree_map(change, given)
        return found

    def named(self, new: int) -> str:
        """Return a new size in words."""
        return f"sizes of {new} in place of {self.size}" if self.inner else f"batches of {new}"


def axes_of(given: Inputs) -> list[Axis]:
    """Return the axes of inputs."""
    shapes = [leaf.shape for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    found = {(dim > 0, size) for shape in shapes for dim, size in enumerate(shape) if size}
    return [Axis(*each) for each in sorted(found)]


def other_inputs(given: Inputs, sizes: Mapping[Axis, Collection[int]]) -> Iterator[Inputs]:
    """Yield inputs of other sizes, and of another layout, dtype and rank.

    Args:
        given: inputs of the example.
        sizes: axis -> sizes at which a forward may take another branch.
    """
    small = max((leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), default=0) <= SMALL
    for axis in axes_of(given):
        size = axis.size
        tried = {
            1,
            size - 1,
            size + 1,
            size // 2,
            *[2 * size] * small,
            *[2, 3] * (not axis.inner),
            *sizes.get(axis, ()),
        }
        for new in sorted(each for each in tried if each > 0 and each != size):
            yield axis.resized(given, new)
    for change in (_cut, _low, _turned, _first, _within, _as_image, _half):
        yield tree_map(lambda leaf, change=change: change(leaf) if isinstance(leaf, Tensor) else leaf, given)


def other_flags(model: nn.Module, given: Inputs) -> Iterator[tuple[Inputs, str]]:
    """Yield calls with the other value of one flag of the forward, each with the flag, such as `skip=True`."""
    signature = inspect.signature(model.forward)
    try:
        flags = signature.bind(*given[0], **given[1]).arguments
    except TypeError:  # the network's own way of calling its forward has other arguments
        return
    for name, parameter in signature.parameters.items():
        value = flags.get(name, parameter.default)
        if isinstance(value, bool) or (value is None and "bool" in str(parameter.annotation)):
            call = signature.bind(*given[0], **given[1])
            call.arguments[name] = not value
            yield (call.args, call.kwargs), f"{name}={not value}"


def _cut(leaf: Tensor) -> Tensor:
    """Return a tensor of half the size along the last dimension, such as a narrow image."""
    return leaf[..., : (leaf.shape[-1] + 1) // 2] if leaf.ndim > 1 else leaf


def _low(leaf: Tensor) -> Tensor:
    return _cut(leaf.mT).mT if leaf.ndim > 1 else leaf


def _turned(leaf: Tensor) -> Tensor:
    """Return a tensor with other strides."""
    return leaf.mT.contiguous().mT if leaf.ndim > 1 else leaf


def _first(leaf: Tensor) -> Tensor:
    return leaf[0] if leaf.ndim and len(leaf) else leaf


def _within(leaf: Tensor) -> Tensor:
    """Return a tensor as the only entry of a batch."""
    return leaf.unsqueeze(0)


def _as_image(leaf: Tensor) -> Tensor:
    return (leaf * 64).clamp(0, 255).to(torch.uint8) if leaf.is_floating_point() else leaf


def _half(leaf: Tensor) -> Tensor:
    return leaf.half() if leaf.is_floating_point() else leaf
