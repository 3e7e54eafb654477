"""Kernels `columns_amx` and `pixels_amx`: kernels of bytes for groups of 16 outputs that share blocks of four inputs.

A processor with AMX multiplies 16 blocks of 16 outputs by 16 columns of inputs in one instruction. A group reads a
block if any of its outputs has a weight there, so it gains most from zeros in blocks of 16 outputs and four inputs. The
sums are the whole numbers of `byte_kernels`, bit for bit; processors without AMX compute them with vectors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pruning.kernels import column_kernel, pixel_kernel
from pruning.kernels.byte_kernels import bind_columns, bind_pixels, in_blocks, is_offered
from pruning.kernels.library import library
from pruning.kernels.sparse_weight import Kernel, LayerShape, Setting, SparseWeight

GROUP = 16
"""Outputs of a group, and blocks that are multiplied at once."""


def _grouped(blocks: SparseWeight) -> tuple[SparseWeight, Tensor]:
    """Return the blocks that each group reads, filled up to sixteens, and tiles of the weights of 16 outputs in 16."""
    rows, groups = blocks.rows(), -(-blocks.shape[0] // GROUP)
    keys, of_weights = torch.unique(rows // GROUP * blocks.row + blocks.columns, return_inverse=True)
    counts = torch.bincount(keys // blocks.row, minlength=groups)
    starts = torch.zeros(groups + 1, dtype=torch.int64)
    starts[1:] = ((counts + GROUP - 1) // GROUP * GROUP).cumsum(0)
    filled = starts[:-1] - (counts.cumsum(0) - counts)  # blocks of zeros that fill up the groups before
    places = torch.arange(len(keys)) + filled[keys // blocks.row]
    columns = torch.zeros(int(starts[-1]), dtype=torch.int32)
    columns[places] = (keys % blocks.row).int()
    tiles = torch.zeros(len(columns) // GROUP, GROUP, GROUP, dtype=torch.int32)
    place = places[of_weights]
    tiles[place // GROUP, rows % GROUP, place % GROUP] = blocks.values
    return SparseWeight((groups, *blocks.shape[1:]), starts.int(), columns, columns), tiles


def _pack(floats: Kernel, weight: SparseWeight, layer: LayerShape, setting: Setting) -> list[Tensor]:
    """Return the arrays of a kernel of floats for the blocks of groups, with tiles in place of values."""
    blocks, smaller, more = in_blocks(weight, layer)
    grouped, tiles = _grouped(blocks)
    whole = {**setting, "block": max(1, grouped.row)}
    *positions, _ = floats.pack(grouped, replace(smaller, outputs=grouped.shape[0]), whole)
    return [*positions, tiles, *more]


def _is_offered(weight: SparseWeight, layer: LayerShape) -> bool:
    """Return whether the processor has tiles, and no group of outputs lies in two groups of channels."""
    whole = layer.groups == 1 or not layer.outputs // layer.groups % GROUP
    return whole and is_offered(weight, layer) and bool(library().has_tiles())


def _column_settings(weight: SparseWeight, layer: LayerShape, examples: int) -> Iterator[Setting]:
    if _is_offered(weight, layer):
        yield from column_kernel.tiles(examples)


def _pixel_settings(weight: SparseWeight, layer: LayerShape, _examples: int) -> Iterator[Setting]:
    if _is_offered(weight, layer) and pixel_kernel.fits(layer, {}):
        yield from ({"vectors": vectors} for vectors in pixel_kernel.VECTORS)


COLUMNS = Kernel(_column_settings, partial(_pack, column_kernel.KERNEL), partial(bind_columns, group=GROUP))
PIXELS = Kernel(_pixel_settings, partial(_pack, pixel_kernel.KERNEL), partial(bind_pixels, group=GROUP))
