"""Kernel `pixels`: convolutions, each weight times a tile of consecutive pixels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pruning.kernels.library import compiled_call
from pruning.kernels.sparse_weight import Kernel, LayerShape, Run, Setting, SparseWeight, blocked, blocks_of

CHANNELS = (16, 32)
"""Numbers of input channels in a block to try, besides all channels."""
VECTORS = (2, 4, 8)
"""Largest numbers of vectors in a tile to try."""
MOST_PHASES, FARTHEST = 16, 2**15 - 1


def _periods(layer: LayerShape, setting: Setting) -> tuple[int, int]:
    """Return the distances of a kernel's places that read the same plane, down and right: the strides.

    With the setting `apart`, each column of the kernel has a plane of its own, whose rows begin at whole vectors if the
    outputs' rows do: vectors that lie across two lines of the cache take twice as long.
    """
    width = layer.kernel[1] * layer.dilation[1]
    return layer.stride[0], max(layer.stride[1], width) if setting.get("apart") else layer.stride[1]


def _phases(layer: LayerShape, setting: Setting) -> list[tuple[int, int]]:
    """Return the phases of the periods that a kernel reads, (down, right)."""
    down, right = (
        sorted({place * step % period for place in range(size)})
        for size, step, period in zip(layer.kernel, layer.dilation, _periods(layer, setting), strict=True)
    )
    return [(one, other) for one in down for other in right]


def _farthest(layer: LayerShape, setting: Setting) -> tuple[int, int]:
    """Return the largest distance between a weight's pixel and that of the kernel's first place, down and right."""
    down, right = (
        (size - 1) * step // period
        for size, step, period in zip(layer.kernel, layer.dilation, _periods(layer, setting), strict=True)
    )
    return down, right


def fits(layer: LayerShape, setting: Setting) -> bool:
    """Return whether the struct `Geometry` can hold a layer."""
    return len(_phases(layer, setting)) <= MOST_PHASES and max(_farthest(layer, setting)) <= FARTHEST


def _settings(weight: SparseWeight, layer: LayerShape, _examples: int) -> Iterator[Setting]:
    if not fits(layer, {}):
        return
    taps, channels = layer.kernel[0] * layer.kernel[1], weight.shape[1]
    for block in (*(size for size in CHANNELS if size < channels), channels):
        for vectors in VECTORS:
            yield {"block": block * taps, "vectors": vectors}
        apart: Setting = {"block": block * taps, "vectors": VECTORS[-1], "apart": 1}
        if layer.kernel[1] > 1 and fits(layer, apart):
            yield apart


def _pack(weight: SparseWeight, layer: LayerShape, setting: Setting) -> list[Tensor]:
    """Return the starts of rows by block; the plane, the distances down and right, and the value of each weight."""
    starts, order, _ = blocked(weight, setting["block"])
    column, row = weight.columns.long()[order], weight.rows()[order]
    height, width = layer.kernel
    group = row // (layer.outputs // layer.groups)
    channel = column // (height * width) + group * (layer.inputs // layer.groups)
    down = column // width % height * layer.dilation[0]
    right = column % width * layer.dilation[1]
    phases, periods = _phases(layer, setting), _periods(layer, setting)
    table = torch.zeros(periods, dtype=torch.int64)
    for index, (one, other) in enumerate(phases):
        table[one, other] = index
    phase = table[down % periods[0], right % periods[1]]
    return [
        starts,
        (channel * len(phases) + phase).int(),
        (down // periods[0]).short(),
        (right // periods[1]).short(),
        weight.values[order],
    ]


def geometry(layer: LayerShape, setting: Setting, arrays: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Return the struct `Geometry` of `sources/pixels.c` for a shape of inputs."""
    sizes = (1, *shape[2:]) if layer.flat else tuple(shape[2:])
    outputs = layer.output(shape)[2:]
    phases = _phases(layer, setting)
    downs, rights = ([each[axis] for each in phases] + [0] * (MOST_PHASES - len(phases)) for axis in (0, 1))
    return torch.tensor(
        [
            *(shape[0], layer.inputs, *sizes, layer.outputs, *((1, *outputs) if layer.flat else outputs)),
            *(*layer.stride, *layer.padding[:2], *_farthest(layer, setting)),
            *(len(phases), blocks_of(arrays[0], layer), setting["vectors"], *downs, *rights),
        ],
        dtype=torch.int64,
    )


def _bind(layer: LayerShape, setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
    return compiled_call("pixels", (), (geometry(layer, setting, arrays, shape), *arrays, bias), layer, shape)


KERNEL = Kernel(_settings, _pack, _bind)
