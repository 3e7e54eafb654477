"""Kernels `lookup_int8`, `columns_int8` and `pixels_int8`: weights and inputs rounded to bytes, four at once.

With the layer's scale s and zero point z of inputs, and a scale t of each output's weights:

    q(x) = min(max(round(x / s) + z, 0), 255);  q(w) = round(w / t),  t = max |w| / 127
    y = s t sum_j q(w_j) (q(x_j) - z) + b

The sum is one of whole numbers, so that its bits are equal on every machine. A block of four consecutive inputs of an
output (of input channels of its group, at one place of a convolution's kernel) is left out if all its weights round to
zero. A block is one nonzero of a weight with a fourth of the inputs, which `lookup`, `columns` and `pixels` hold.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pruning.kernels import column_kernel, lookup_kernel, pixel_kernel
from pruning.kernels.byte_tensors import joined
from pruning.kernels.library import compiled_call, linear_call
from pruning.kernels.sparse_weight import (
    LARGEST,
    Kernel,
    LayerShape,
    Run,
    Setting,
    SparseWeight,
    blocks_of,
    in_fours,
)

LARGEST_BYTE, LARGEST_WEIGHT = 255, 127


def rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as whole numbers from -127 to 127, and the scale of each output, both float32.

    A scale has 16 significant bits, rounded up, so that whole numbers times scales are exact in float32, and give the
    same whole numbers and scales again.
    """
    scales = weight.flatten(1).abs().amax(1) / LARGEST_WEIGHT
    scales = ((scales.view(torch.int32) + 0xFF) & ~0xFF).view(torch.float32)
    scales = torch.where(scales > 0, scales, 1.0)
    return (weight / scales.view(-1, *[1] * (weight.ndim - 1))).round(), scales


def is_offered(weight: SparseWeight, layer: LayerShape) -> bool:
    """Return whether inputs have a scale, an output has several inputs at a place, and no sum exceeds 32 bits."""
    fits = weight.row * LARGEST_BYTE * LARGEST_WEIGHT <= LARGEST and bool(weight.values.isfinite().all())
    return layer.rounding is not None and weight.shape[1] > 1 and fits


def in_blocks(weight: SparseWeight, layer: LayerShape) -> tuple[SparseWeight, LayerShape, list[Tensor]]:
    """Return a weight's blocks as nonzeros, the layer that has them, and first sums, scales and roundings."""
    given = layer.rounding
    assert given is not None, "kernels of bytes are offered to layers with a rounding"
    found, scales = rounded(weight.dense())
    whole = found.to(torch.int8)
    first = -given.zero * whole.flatten(1).sum(1)
    blocks = SparseWeight.of(joined(whole))
    inputs = layer.groups * blocks.shape[1]
    made, added = ((each.scale, each.zero) if each else (0.0, 0) for each in (layer.made, layer.added))
    roundings = [1 / given.scale, given.zero, 1 / made[0] if made[0] else 0.0, made[1], *added]
    more = [first.int(), scales * given.scale, torch.tensor(roundings, dtype=torch.float32)]
    return blocks, replace(layer, inputs=inputs), more


def _pack(floats: Kernel, weight: SparseWeight, layer: LayerShape, setting: Setting) -> list[Tensor]:
    """Return the arrays that a kernel of floats has for blocks, and first sums, scales and roundings."""
    blocks, smaller, more = in_blocks(weight, layer)
    return [*floats.pack(blocks, smaller, setting), *more]


def _lookup_settings(weight: SparseWeight, layer: LayerShape, examples: int) -> Iterator[Setting]:
    if is_offered(weight, layer):
        yield from lookup_kernel.KERNEL.settings(weight, layer, examples)


def _lookup_bind(
    layer: LayerShape, _setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size
) -> Run:
    lookup_kernel.check()
    return linear_call("lookup_int8", (int(layer.takes_bytes),), arrays, bias, layer, shape)


def _column_settings(weight: SparseWeight, layer: LayerShape, examples: int) -> Iterator[Setting]:
    if is_offered(weight, layer):
        yield from column_kernel.settings(in_fours(weight.row), examples)


def bind_columns(
    layer: LayerShape, setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size, *, group: int = 1
) -> Run:
    """Return the call of a linear layer whose blocks `group` outputs share."""
    numbers = blocks_of(arrays[0], layer), setting["doublings"], int(layer.takes_bytes), group
    return linear_call("columns_int8", numbers, arrays, bias, layer, shape)


def _pixel_settings(weight: SparseWeight, layer: LayerShape, examples: int) -> Iterator[Setting]:
    if is_offered(weight, layer):
        fours = replace(weight, shape=(weight.shape[0], in_fours(weight.shape[1]), *weight.shape[2:]))
        yield from pixel_kernel.KERNEL.settings(fours, layer, examples)


def bind_pixels(
    layer: LayerShape, setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size, *, group: int = 1
) -> Run:
    """Return the call of a convolution whose blocks `group` outputs share."""
    channels = layer.inputs // layer.groups
    smaller = replace(layer, inputs=layer.groups * in_fours(channels))
    numbers = channels, layer.groups, int(layer.takes_bytes), group
    geometry = pixel_kernel.geometry(smaller, setting, arrays, shape)
    return compiled_call("pixels_int8", numbers, (geometry, *arrays, bias), layer, shape)


LOOKUP = Kernel(_lookup_settings, partial(_pack, lookup_kernel.KERNEL), _lookup_bind)
COLUMNS = Kernel(_column_settings, partial(_pack, column_kernel.KERNEL), bind_columns)
PIXELS = Kernel(_pixel_settings, partial(_pack, pixel_kernel.KERNEL), bind_pixels)
