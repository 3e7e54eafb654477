"""Kernel `dense`: PyTorch's own operation on all weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pruning.kernels.byte_tensors import bytes_of, floats_of
from pruning.kernels.sparse_weight import Kernel, LayerShape, Run, Setting, SparseWeight


def _settings(_weight: SparseWeight, _layer: LayerShape, _examples: int) -> Iterator[Setting]:
    yield {}


def _pack(weight: SparseWeight, _layer: LayerShape, _setting: Setting) -> list[Tensor]:
    return [weight.dense()]


def _bind(layer: LayerShape, _setting: Setting, arrays: Sequence[Tensor], bias: Tensor, _shape: torch.Size) -> Run:
    product = (_linear if layer.kind == "linear" else _convolution)(layer, arrays[0], bias)
    run = _with_ends(layer, product)
    return _in_floats(layer, run) if layer.in_bytes else run


def _in_floats(layer: LayerShape, run: Run) -> Run:
    """Return a call that takes and returns bytes, and computes in floats."""

    def whole(x: Tensor, added: Tensor | None) -> Tensor:
        if layer.takes_bytes and layer.rounding:
            x = floats_of(x, layer.rounding, layer.inputs, layer)
        if added is not None and layer.added:
            added = floats_of(added, layer.added, layer.outputs, layer)
        y = run(x, added)
        return bytes_of(y, layer.made, layer) if layer.made else y

    return whole


def _with_ends(layer: LayerShape, product: Callable[[Tensor], Tensor]) -> Run:
    """Return a call that adds a tensor to a product, and clamps."""
    low, high = layer.low, layer.high
    if math.isinf(low) and math.isinf(high):

        def run(x: Tensor, added: Tensor | None) -> Tensor:
            return product(x) if added is None else product(x).add_(added)
    elif not low and math.isinf(high):

        def run(x: Tensor, added: Tensor | None) -> Tensor:
            return (product(x) if added is None else product(x).add_(added)).relu_()
    else:

        def run(x: Tensor, added: Tensor | None) -> Tensor:
            return (product(x) if added is None else product(x).add_(added)).clamp_(low, high)

    return run


def _linear(_layer: LayerShape, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    def product(x: Tensor) -> Tensor:
        return F.linear(x, weight, bias)

    return product


def _convolution(layer: LayerShape, weight: Tensor, bias: Tensor) -> Callable[[Tensor], Tensor]:
    top, left, bottom, right = layer.padding
    own = (top, left) if (top, left) == (bottom, right) else (0, 0)
    padded = own != (top, left) or own != (bottom, right)
    call = F.conv1d if layer.flat else F.conv2d
    cut = slice(1, 2) if layer.flat else slice(0, 2)
    stride, dilation, padding = layer.stride[cut], layer.dilation[cut], own[cut]

    def product(x: Tensor) -> Tensor:
        if padded:
            x = F.pad(x, (left, right) if layer.flat else (left, right, top, bottom))
        return call(x, weight, bias, stride, padding, dilation, layer.groups)

    return product


KERNEL = Kernel(_settings, _pack, _bind)
