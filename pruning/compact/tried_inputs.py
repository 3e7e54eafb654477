"""Inputs of other sizes, layouts, dtypes and ranks than an example's, on which networks are compared."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pruning.graph.input_guard import NAMES, holds
from pruning.measure.macs import Inputs

LARGEST_SIZE = 300
"""Largest batch that is tried whatever memory it takes, because a condition may fail there."""
SMALL = 2**16
"""Number of entries of an input up to which double sizes are tried."""


def other_inputs(given: Inputs, rules: Iterable[str], most: int = LARGEST_SIZE) -> Iterator[Inputs]:
    """Yield inputs of other sizes, with the other sides of conditions, and of another layout, dtype and rank.

    Args:
        given: inputs of the example.
        rules: conditions on sizes.
        most: largest batch at which the other side of a condition is tried.
    """
    tensors = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
    failing = {each for rule in rules for each in failing_batches(rule) if each <= most}
    small = max((leaf.numel() for leaf in tensors), default=0) <= SMALL
    for inner, size in sorted({(dim > 0, size) for leaf in tensors for dim, size in enumerate(leaf.shape) if size}):
        tried = {1, size - 1, size + 1, size // 2, *[2 * size] * small}
        if not inner:
            tried |= {2, 3, *failing}
        for new in sorted(each for each in tried if each > 0 and each != size):
            yield tree_map(partial(_resized, inner=inner, size=size, new=new), given)
    for change in (_cut, _low, _turned, _first, _within, _as_image):
        yield tree_map(lambda leaf, change=change: change(leaf) if isinstance(leaf, Tensor) else leaf, given)


def failing_batches(rule: str) -> list[int]:
    """Return batches at which a condition may fail: near a number in it, and near a quotient of two numbers."""
    numbers = {int(number) for number in re.findall(r"\b\d+\b", rule)}
    near = {one // other + step for one in numbers for other in numbers | {1} if other for step in (-1, 0, 1)}
    return sorted(each for each in near if each > 0 and _may_fail(rule, each))


def _may_fail(rule: str, batch: int) -> bool:
    """Return whether a condition fails for a batch, or reads other sizes, too.

    Where all conditions hold, the network repeats the operations of the example, and a large batch only takes time.
    """
    known = re.sub(r"\w+\.shape\[0\]", str(batch), rule)
    return ".shape[" in known or not holds(eval(f"lambda: {known}", NAMES), [])


def _resized(leaf: Any, *, inner: bool, size: int, new: int) -> Any:
    """Return a tensor with new sizes in place of one: of the first dimension, or of the others."""
    if isinstance(leaf, Tensor):
        for dim in range(1, leaf.ndim) if inner else range(min(leaf.ndim, 1)):
            if leaf.shape[dim] == size:
                leaf = leaf.index_select(dim, torch.arange(new) % size)
    return leaf


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
