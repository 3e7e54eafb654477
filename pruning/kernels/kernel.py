"""The interface of a kernel: settings to try, its arrays of a weight, and calls for one shape of inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pruning.kernels.sparse_weight import LayerShape, SparseWeight

Setting = Mapping[str, int]
"""A kernel's numbers, such as the size of its tiles."""
Run = Callable[[Tensor, Tensor | None], Tensor]
"""Computes a layer: (inputs, tensor to add before the clamp or None) -> outputs. Inputs are contiguous."""


@dataclass(frozen=True)
class Kernel:
    """A way to compute a layer.

    Args:
        settings: (weight, layer, examples) -> settings that may be the fastest; none if it cannot compute the layer.
        pack: (weight, layer, setting) -> the kernel's arrays of the weight.
        bind: (layer, setting, arrays, bias, shape of inputs) -> the call for this shape. The caller keeps the arrays
            and the bias alive. It raises RuntimeError if the machine lacks what the kernel needs.
    """

    settings: Callable[[SparseWeight, LayerShape, int], Iterator[Setting]]
    pack: Callable[[SparseWeight, LayerShape, Setting], list[Tensor]]
    bind: Callable[[LayerShape, Setting, Sequence[Tensor], Tensor, torch.Size], Run]


def blocked(weight: SparseWeight, size: int) -> tuple[Tensor, Tensor, int]:
    """Return a weight's nonzeros in blocks of `size` columns, block by block and row by row in each.

    Returns:
        starts: int32, shape (blocks * outputs + 1,): the place of the first nonzero of each row of each block.
        order: int64: the places of the nonzeros in the weight.
        blocks: the number of blocks.
    """
    blocks = max(1, -(-weight.row // size))
    keys = weight.columns.long() // size * weight.shape[0] + weight.rows()
    order = keys.argsort(stable=True)
    starts = torch.zeros(blocks * weight.shape[0] + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(keys, minlength=blocks * weight.shape[0]).cumsum(0)
    return starts, order, blocks
