"""Statistics of the inputs of layers, summed over batches: X^T X, and the number of rows of X."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pruning.reconstruction.block_order import is_transposed
from pruning.scores.readings.per_example import patches


def rows_of_weight(module: nn.Module, weight: Tensor) -> Tensor:
    """Return a layer's weight as (groups, outputs of a group, inputs of a group)."""
    if is_transposed(module):
        return weight.mT[None]
    groups = module.groups if isinstance(module, _ConvNd) else 1
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def weight_of_rows(module: nn.Module, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return the weight, of a layer's shape, that `rows_of_weight` laid out as rows."""
    return rows[0].mT.reshape(shape) if is_transposed(module) else rows.reshape(shape)


def rows_of_inputs(module: nn.Module, inputs: Tensor, counts: Tensor | None) -> Tensor:
    """Return the vectors that multiply the rows of a layer's weight: (groups, vectors, inputs of a group).

    Args:
        module: the layer.
        inputs: its input; the patches of a convolution's input are its vectors.
        counts: bool of the leading dimensions of `inputs`, False where a position is padding; None: all count.
    """
    if isinstance(module, _ConvNd):
        cut = patches(inputs, module)
        return cut.view(*cut.shape[:2], module.groups, -1).permute(2, 0, 1, 3).flatten(1, 2)
    if counts is not None and inputs.shape[: counts.ndim] == counts.shape and inputs.ndim > counts.ndim:
        return inputs[counts].flatten(0, -2)[None]
    return inputs.flatten(0, -2)[None]


@dataclass
class InputStatistics:
    """X^T X of one input, for each group of a layer.

    Args:
        dtype: dtype of the sums.
        product: (groups, inputs, inputs); None before the first batch.
        rows: number of rows of X.
        last: the input of the last call, by which layers that share an input are recognised.
    """

    dtype: torch.dtype
    product: Tensor | None = None
    rows: int = 0
    last: Any = None

    def add(self, rows: Tensor) -> None:
        """Add vectors: (groups, vectors, inputs)."""
        rows = rows.to(self.dtype)
        if self.product is None:
            self.product = rows.new_zeros(rows.shape[0], rows.shape[2], rows.shape[2])
        self.product.baddbmm_(rows.mT, rows)
        self.rows += rows.shape[1]

    def hessian(self, width: int, groups: int, like: Tensor) -> Tensor:
        """Return 2 / N X^T X, (groups, inputs, inputs); zeros if there was no input."""
        if self.product is None or not self.rows:
            return torch.zeros(groups, width, width, dtype=self.dtype, device=like.device)
        return self.product * (2 / self.rows)


@dataclass
class Collector:
    """Statistics of the layers of one part of a network, while batches run through it.

    Layers that get one tensor share one `InputStatistics`.

    Args:
        layers: name of a weight -> its layer.
        dtype: dtype of the sums.
        counts: bool of (examples, positions), False where a position of the batch is padding; None: all count.
        found: name of a weight -> the statistics of its inputs.
    """

    layers: Mapping[str, nn.Module]
    dtype: torch.dtype
    counts: Tensor | None = None
    found: dict[str, InputStatistics] = field(default_factory=dict)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Read the inputs of the layers inside the context."""
        handles = [
            module.register_forward_pre_hook(self._reader(name), with_kwargs=True)
            for name, module in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for statistics in self.found.values():
                statistics.last = None

    def _reader(self, name: str) -> Any:
        def read(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            inputs = given[0] if given else named["input"]
            key = (inputs.data_ptr(), inputs._version, inputs.shape, inputs.stride(), inputs.dtype)
            own = self.found.get(name)
            if own is None:
                shared = [each for each in self.found.values() if each.last is not None and each.last[0] == key]
                alike = not isinstance(module, _ConvNd)
                own = self.found[name] = shared[0] if shared and alike else InputStatistics(self.dtype)
            if own.last is None or own.last[0] != key:
                own.last = (key, inputs)  # the tensor stays alive, so that its address stays its own
                own.add(rows_of_inputs(module, inputs.detach(), self.counts))

        return read
