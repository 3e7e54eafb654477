"""Kernel `rows`: one output of one example at a time, for any processor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pruning.kernels.library import linear_call
from pruning.kernels.sparse_weight import Kernel, LayerShape, Run, Setting, SparseWeight

MOST_EXAMPLES = 4
"""Above this batch size, `columns` is faster."""


def _settings(_weight: SparseWeight, _layer: LayerShape, examples: int) -> Iterator[Setting]:
    if examples <= MOST_EXAMPLES:
        yield {}


def _pack(weight: SparseWeight, _layer: LayerShape, _setting: Setting) -> list[Tensor]:
    return [weight.starts, weight.columns, weight.values]


def _bind(layer: LayerShape, _setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
    return linear_call("rows", (), arrays, bias, layer, shape)


KERNEL = Kernel(_settings, _pack, _bind)
