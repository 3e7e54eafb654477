"""Calls on which networks are compared: other sizes, layouts, dtypes, ranks and flags than those of an example."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from pruning.measure.macs import Inputs

SMALL = 2**16
"""Number of entries of an example up to which double sizes are tried, and of an input of `LARGER` times a size."""
LARGER = 8
"""Multiple of a size that is tried, and one more, as a forward may fill sizes up to a multiple."""


@dataclass(frozen=True)
class Axis:
    """Dimensions of inputs whose sizes change together.

    Args:
        size: their size.
        places: (number of an input, dimension) of each.
    """

    size: int
    places: frozenset[tuple[int, int]]

    @property
    def inner(self) -> bool:
        """Whether they are others than the first ones."""
        return any(dim for _, dim in self.places)

    def named(self, new: int) -> str:
        """Return a new size in words."""
        return f"{'sizes' if self.inner else 'batches'} of {new}"

    def resized(self, given: Inputs, new: int) -> Inputs:
        """Return inputs with a new size, whose entries repeat."""
        leaves, form = tree_flatten(given)
        for number, dim in self.places:
            leaves[number] = leaves[number].index_select(dim, torch.arange(new) % self.size)
        found: Inputs = tree_unflatten(leaves, form)
        return found


def axes_of(given: Inputs, *, single: bool = False) -> list[Axis]:
    """Return the axes of inputs: first dimensions of one size, others of one size, and each of these alone if asked.

    Dimensions of a size that first and other dimensions have change together, too: the batch may come first in a
    sequence and second in the states of recurrent layers.
    """
    own = defaultdict[tuple[bool, int], set[tuple[int, int]]](set)
    for number, leaf in enumerate(tree_leaves(given)):
        for dim, size in enumerate(leaf.shape if isinstance(leaf, Tensor) else ()):
            own[dim > 0, size].add((number, dim))
    groups = sorted((inner, size) for inner, size in own if size)
    axes = [Axis(size, frozenset(own[inner, size])) for inner, size in groups]
    both = sorted(size for inner, size in groups if inner and (False, size) in own)
    axes += [Axis(size, frozenset(own[False, size] | own[True, size])) for size in both]
    alone = [Axis(axis.size, frozenset([each])) for axis in axes for each in sorted(axis.places)]
    return list(dict.fromkeys([*axes, *alone * single]))


def other_inputs(given: Inputs) -> Iterator[Inputs]:
    """Yield inputs of other sizes, and of another layout, dtype and rank."""
    largest = max((leaf.numel() for leaf in tree_leaves(given) if isinstance(leaf, Tensor)), default=0)
    together = axes_of(given)
    for axis in axes_of(given, single=True):
        dims = len({dim for _, dim in axis.places})
        sizes = {LARGER * axis.size, LARGER * axis.size + 1} if largest * LARGER**dims <= SMALL else set()
        if axis in together:
            sizes |= {1, axis.size - 1, axis.size + 1, axis.size // 2, *[2, 3] * (not axis.inner)}
            sizes |= {2 * axis.size} if largest <= SMALL else set()
        for new in sorted(each for each in sizes if each > 0 and each != axis.size):
            yield axis.resized(given, new)
    dtypes = (partial(_converted, dtype=each) for each in (torch.half, torch.bfloat16, torch.double, torch.int32))
    for change in (_redrawn, _cut, _low, _turned, _first, _within, _as_image, *dtypes):
        changed = tree_map(lambda leaf, change=change: change(leaf) if isinstance(leaf, Tensor) else leaf, given)
        if any(new is not old for new, old in zip(tree_leaves(changed), tree_leaves(given), strict=True)):
            yield changed


def other_arguments(model: nn.Module, given: Inputs) -> Iterator[tuple[Inputs, str]]:
    """Yield calls with another value of one flag or number of the forward, each with it, such as `skip=True`."""
    for name, value in _values(model, given).items():
        if isinstance(value, int | float):
            call = inspect.signature(model.forward).bind(*given[0], **given[1])
            call.arguments[name] = other = not value if isinstance(value, bool) else value + 1
            yield (call.args, call.kwargs), f"{name}={other}"


def arguments_left_out(model: nn.Module, given: Inputs) -> list[str]:
    """Return the names of arguments of the forward, flags aside, that are None in a call."""
    return [name for name, value in _values(model, given).items() if value is None]


def _values(model: nn.Module, given: Inputs) -> dict[str, Any]:
    """Return the value of each argument of the forward; False for a flag that is None."""
    signature = inspect.signature(model.forward)
    try:
        call = signature.bind(*given[0], **given[1])
    except TypeError:  # the network's own way of calling its forward has other arguments
        return {}
    call.apply_defaults()
    flags = {name for name, each in signature.parameters.items() if "bool" in str(each.annotation)}
    return {name: False if value is None and name in flags else value for name, value in call.arguments.items()}


def _redrawn(leaf: Tensor) -> Tensor:
    """Return truth values and whole numbers drawn anew, up to the largest one."""
    if leaf.is_floating_point() or leaf.is_complex() or not leaf.numel():
        return leaf
    generator = torch.Generator().manual_seed(0)
    low, high = (0, 1) if leaf.dtype is torch.bool else (min(0, int(leaf.min())), int(leaf.max()))
    return torch.randint(low, high + 1, leaf.shape, generator=generator).to(leaf.dtype)


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


def _converted(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor of real numbers, or one of whole numbers, in another such dtype."""
    if leaf.is_floating_point() == dtype.is_floating_point and leaf.dtype not in (torch.bool, torch.uint8):
        return leaf if leaf.is_complex() else leaf.to(dtype)
    return leaf
