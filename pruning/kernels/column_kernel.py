"""Kernel `columns`: each weight times a tile of examples, whose inputs are transposed first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pruning.kernels.library import linear_call
from pruning.kernels.sparse_weight import Kernel, LayerShape, Run, Setting, SparseWeight, blocked, blocks_of

BLOCKS = (128, 256)
"""Numbers of inputs in a block to try, besides all inputs."""
DOUBLINGS = {0: 1, 1: 17, 2: 33}
"""Doublings of a tile's vectors to try -> the batch size from which they can be faster (with 16 floats a vector)."""


def tiles(examples: int) -> Iterator[Setting]:
    """Yield the sizes of tiles for so many examples."""
    for doublings, least in DOUBLINGS.items():
        if least <= examples and (doublings + 1 not in DOUBLINGS or examples < 4 * DOUBLINGS[doublings + 1]):
            yield {"doublings": doublings}


def settings(row: int, examples: int) -> Iterator[Setting]:
    """Yield the settings for rows of so many elements."""
    sizes = [*(size for size in BLOCKS if size < row), row]
    for tile in tiles(examples):
        yield from ({"block": size, **tile} for size in sizes)


def _settings(weight: SparseWeight, _layer: LayerShape, examples: int) -> Iterator[Setting]:
    yield from settings(weight.row, examples)


def _pack(weight: SparseWeight, _layer: LayerShape, setting: Setting) -> list[Tensor]:
    starts, order, _ = blocked(weight, setting["block"])
    return [starts, weight.columns[order], weight.values[order]]


def _bind(layer: LayerShape, setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
    return linear_call("columns", (blocks_of(arrays[0], layer), setting["doublings"]), arrays, bias, layer, shape)


KERNEL = Kernel(_settings, _pack, _bind)
