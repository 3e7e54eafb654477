"""The nonzero weights of a layer, the layer's numbers, and the interface of the kernels that compute with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

LARGEST = 2**31 - 1


def in_fours(count: int) -> int:
    """Return the number of elements that hold so many bytes."""
    return -(-count // 4)


@dataclass(frozen=True)
class SparseWeight:
    """A weight's nonzeros in rows (CSR): one row for each output.

    Args:
        shape: shape of the dense weight, (outputs, inputs, *kernel).
        starts: int32, shape (outputs + 1,): the place of each row's first nonzero, and their number.
        columns: int32, shape (nonzeros,): positions in the flattened row, ascending in each row.
        values: float32, or int32 for blocks of four bytes, shape (nonzeros,).
    """

    shape: tuple[int, ...]
    starts: Tensor
    columns: Tensor
    values: Tensor

    @classmethod
    def of(cls, weight: Tensor) -> SparseWeight:
        """Return the nonzeros of a dense weight, in float32 or, of whole numbers, int32; NaN counts as nonzero."""
        flat = weight.detach().flatten(1)
        flat = flat.float() if flat.is_floating_point() else flat.int()
        used = flat != 0
        rows, columns = used.nonzero(as_tuple=True)
        starts = torch.zeros(len(flat) + 1, dtype=torch.int32)
        starts[1:] = used.sum(1).cumsum(0)
        return cls(tuple(weight.shape), starts, columns.int(), flat[rows, columns])

    def dense(self) -> Tensor:
        """Return the dense weight."""
        flat = torch.zeros(self.shape[0], self.row, dtype=self.values.dtype)
        flat[self.rows(), self.columns.long()] = self.values
        return flat.view(self.shape)

    @property
    def row(self) -> int:
        """Number of entries of a dense row."""
        return math.prod(self.shape[1:])

    def rows(self) -> Tensor:
        """Return the row of each nonzero, int64."""
        return torch.repeat_interleave(torch.arange(self.shape[0]), self.starts.diff().long())

    @property
    def sparsity(self) -> float:
        """Fraction of zeros."""
        return 1 - len(self.values) / max(1, self.shape[0] * self.row)

    def check(self) -> None:
        """Raise ValueError unless positions lie inside the weight, ascend in each row, and agree with the counts."""
        kinds = {"starts": torch.int32, "columns": torch.int32, "values": torch.float32}
        for name, dtype in kinds.items():
            tensor: Tensor = getattr(self, name)
            if tensor.dtype is not dtype or tensor.ndim != 1 or tensor.device.type != "cpu":
                raise ValueError(f"`{name}` must be one row of {dtype}, and is {tensor.dtype} {tuple(tensor.shape)}.")
        if min(self.shape, default=0) < 1 or len(self.shape) < 2 or self.shape[0] * self.row > LARGEST:
            raise ValueError(f"the shape {self.shape} of a weight must have at least two positive sizes.")
        count = len(self.values)
        if len(self.starts) != self.shape[0] + 1 or len(self.columns) != count:
            raise ValueError(f"a weight of shape {self.shape} has {len(self.starts)} starts, {count} values.")
        steps = self.starts.long().diff()  # int32 could wrap around
        if int(self.starts[0]) or int(self.starts[-1]) != count or (steps < 0).any():
            raise ValueError("the starts of rows must ascend from 0 to the number of values.")
        if count and not 0 <= int(self.columns.min()) <= int(self.columns.max()) < self.row:
            raise ValueError(f"the columns of a weight must lie in a row of {self.row} entries.")
        flat = self.rows() * self.row + self.columns
        if (flat.diff() <= 0).any():
            raise ValueError("the columns of each row must ascend.")


@dataclass(frozen=True)
class ByteScale:
    """The meaning of a byte: scale * (byte - zero), with a scale above 0 and a zero point from 0 to 255.

    Tensors of bytes have dtype int32, four consecutive channels of an example in each element, the first in the lowest
    byte: shape (..., ceil(inputs / 4)) for linear layers, (batch, ceil(channels / 4), *sizes) for convolutions.
    """

    scale: float
    zero: int


@dataclass(frozen=True)
class LayerShape:
    """A layer's numbers, as plain data.

    Args:
        kind: "linear" or "convolution"; a one-dimensional convolution has a height of 1.
        inputs: inputs of a linear layer, input channels of a convolution.
        outputs: outputs, or output channels.
        flat: whether a convolution is one-dimensional.
        kernel, stride, padding, dilation: down and right; `padding` has (top, left, bottom, right).
        groups: groups of a convolution's channels.
        low, high: outputs are clamped to this range, (0, inf) after a ReLU.
        rounding: how inputs may be rounded to bytes; None: not at all.
        takes_bytes: whether inputs are bytes already.
        added: the scale of a tensor of bytes that is added, by a convolution; None: a tensor to add has floats.
        made: the scale of outputs as bytes; None: outputs are floats.
    """

    kind: Literal["linear", "convolution"]
    inputs: int
    outputs: int
    flat: bool = False
    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    low: float = float("-inf")
    high: float = float("inf")
    rounding: ByteScale | None = None
    takes_bytes: bool = False
    added: ByteScale | None = None
    made: ByteScale | None = None

    def output(self, shape: Any) -> tuple[Any, ...]:
        """Return the shape of the outputs for inputs of a shape."""
        outputs = in_fours(self.outputs) if self.made else self.outputs
        if self.kind == "linear":
            return (*shape[:-1], outputs)
        sizes = [1, shape[2]] if self.flat else list(shape[2:])
        top, left, bottom, right = self.padding
        found = [
            (size + pads - step * (kernel - 1) - 1) // stride + 1
            for size, pads, step, kernel, stride in zip(
                sizes, (top + bottom, left + right), self.dilation, self.kernel, self.stride, strict=True
            )
        ]
        return (shape[0], outputs, *(found[1:] if self.flat else found))

    @property
    def in_bytes(self) -> bool:
        """Whether inputs, outputs or a tensor to add are bytes."""
        return self.takes_bytes or self.made is not None or self.added is not None

    @property
    def input_dtype(self) -> torch.dtype:
        """Dtype of inputs: float32, or int32 for bytes."""
        return torch.int32 if self.takes_bytes else torch.float32

    @property
    def added_dtype(self) -> torch.dtype:
        """Dtype of a tensor to add: float32, or int32 for bytes."""
        return torch.int32 if self.added else torch.float32

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of outputs: float32, or int32 for bytes."""
        return torch.int32 if self.made else torch.float32

    def check(self, shape: Any) -> None:
        """Raise ValueError unless the layer takes inputs of a shape; kernels read the shape that they are told."""
        given = f"an input of shape {tuple(shape)} of a sparse layer"
        inputs = in_fours(self.inputs) if self.takes_bytes else self.inputs
        if self.kind == "linear":
            if not len(shape) or shape[-1] != inputs:
                raise ValueError(f"{given} must have the shape (..., {inputs}).")
            return
        places = ("length",) if self.flat else ("height", "width")
        if len(shape) != 2 + len(places) or shape[1] != inputs:
            raise ValueError(f"{given} must have the shape (batch, {inputs}, {', '.join(places)}).")
        top, left, bottom, right = self.padding
        sizes = zip((1, shape[2]) if self.flat else shape[2:], (top + bottom, left + right), strict=True)
        reads = [step * (kernel - 1) + 1 for step, kernel in zip(self.dilation, self.kernel, strict=True)]
        if any(size + pads < read for (size, pads), read in zip(sizes, reads, strict=True)):
            raise ValueError(f"{given} must be at least as large, with its padding, as the kernel's extent {reads}.")

    def examples(self, shape: Any) -> int:
        """Return the batch size that a kernel is chosen for: rows of a linear layer, images of a convolution."""
        return math.prod(map(int, shape[:-1] if self.kind == "linear" else shape[:1]))


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
        bind: (layer, setting, arrays, bias, shape of inputs) -> the call for this shape, which keeps the arrays and the
            bias alive. It raises RuntimeError if the machine lacks what the kernel needs.
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


def blocks_of(starts: Tensor, layer: LayerShape) -> int:
    """Return the number of blocks of columns in starts from `blocked`, whose rows are outputs or groups of outputs."""
    return -(-(len(starts) - 1) // layer.outputs)
