"""Statistics of a layer's inputs, X^T X summed over batches, and the least squares on survivors that they allow."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pruning.reconstruction.block_order import is_transposed
from pruning.reconstruction.layer_problem import LayerProblem, Solution
from pruning.repair.batch_norm_statistics import laid_out


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
        counts: bool of (examples, positions), False where a position is padding; None: all count. It applies to inputs
            of the shape (examples, positions, ...), and (examples * positions, inputs).
    """
    if isinstance(module, _ConvNd):
        return laid_out(module, inputs if inputs.ndim == len(module.kernel_size) + 2 else inputs[None])
    if counts is not None and inputs.ndim > 2 and inputs.shape[:2] == counts.shape:
        inputs = inputs[counts]
    elif counts is not None and inputs.ndim == 2 and len(inputs) == counts.numel():
        inputs = inputs[counts.flatten()]
    return laid_out(module, inputs if inputs.ndim > 1 else inputs[None])


@dataclass
class InputStatistics:
    """X^T X of a layer's inputs, for each group of the layer.

    Args:
        dtype: dtype of the sums.
        product: (groups, inputs, inputs); None before the first input.
        rows: number of rows of X.
    """

    dtype: torch.dtype
    product: Tensor | None = None
    rows: int = 0

    def add(self, product: Tensor, rows: int) -> None:
        """Add X^T X of further rows."""
        self.product = product.clone() if self.product is None else self.product.add_(product)
        self.rows += rows

    def hessian(self, width: int, groups: int, like: Tensor) -> Tensor:
        """Return 2 / N X^T X, (groups, inputs, inputs).

        It is the identity, by which all methods rank by magnitude, for a group whose inputs are always 0, and if there
        was no input.
        """
        identity = torch.eye(width, dtype=self.dtype, device=like.device)
        if self.product is None or not self.rows:
            return identity.repeat(groups, 1, 1)
        found = self.product * (2 / self.rows)
        unused = (found.diagonal(dim1=1, dim2=2) == 0).all(dim=1)
        return torch.where(unused[:, None, None], identity, found)


@dataclass
class Collector:
    """Statistics of the layers of one part of a network, while batches run through it.

    Args:
        layers: name of a weight -> its layer.
        dtype: dtype of the sums.
        counts: bool of (examples, positions), False where a position of the batch is padding; None: all count.
        found: name of a weight -> the statistics of its inputs.
        in_lists: weights of layers that may get vectors in any order: all (vectors, inputs) of these layers count.
        unordered: those of `in_lists` that got such inputs with `counts`.
    """

    layers: Mapping[str, nn.Module]
    dtype: torch.dtype
    counts: Tensor | None = None
    found: dict[str, InputStatistics] = field(default_factory=dict)
    in_lists: Collection[str] = ()
    unordered: list[str] = field(default_factory=list)
    _products: list[tuple[Tensor, int, bool, Tensor, int]] = field(default_factory=list)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Read the inputs of the layers in one forward pass inside the context."""
        handles = [
            module.register_forward_pre_hook(partial(self._read, name), with_kwargs=True)
            for name, module in self.layers.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._products.clear()

    def _read(self, name: str, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        inputs = next((each for each in (*given, *named.values()) if isinstance(each, Tensor)), None)
        if inputs is not None:
            product, rows = self._product(module, inputs.detach(), self._counts_of(name, module, inputs))
            self.found.setdefault(name, InputStatistics(self.dtype)).add(product, rows)

    def _counts_of(self, name: str, module: nn.Module, inputs: Tensor) -> Tensor | None:
        """Return the positions that count among the inputs of a layer; None where their order is unknown."""
        if self.counts is None or name not in self.in_lists or inputs.ndim != 2 or isinstance(module, _ConvNd):
            return self.counts
        self.unordered.append(name)
        return None

    def _product(self, module: nn.Module, inputs: Tensor, counts: Tensor | None) -> tuple[Tensor, int]:
        """Return X^T X and the number of rows of X; linear layers that get one tensor share one product."""
        version = -1 if inputs.is_inference() else inputs._version
        is_shared = version >= 0 and not isinstance(module, _ConvNd)
        for tensor, then, counted, product, rows in self._products if is_shared else ():
            same = tensor.data_ptr() == inputs.data_ptr() and tensor.stride() == inputs.stride()
            same = same and counted == (counts is not None)
            if same and then == version and tensor.shape == inputs.shape and tensor.dtype == inputs.dtype:
                return product, rows
        vectors = rows_of_inputs(module, inputs, counts).to(self.dtype)
        with torch.autocast(inputs.device.type, enabled=False):
            product, rows = vectors.mT @ vectors, vectors.shape[1]
        if is_shared:
            # The list keeps the tensor alive, so that no other tensor gets its address.
            self._products.append((inputs, version, counts is not None, product, rows))
        return product, rows


def least_squares(problem: LayerProblem, *, damping: float = 0.01) -> Solution:
    """Refit the survivors of each row so that the layer's outputs change least; no further entry is pruned.

        v_S = w_S + [Hc_SS]^-1 Hc_SZ w_Z,      Hc = H + damping mean(diag H) I

    with S the survivors of a row w, and Z its pruned entries, whose weights are those of before the pruning.

    Args:
        problem: the layer; its target is not read.
        damping: fraction of the mean of the diagonal, above 0.

    Raises:
        ValueError: the statistics are not positive definite.
    """
    hessian, weight, kept = problem.damped(damping), problem.weight, problem.kept
    found = weight.masked_fill(~kept, 0)
    for row, survives in enumerate(kept):
        inside, gone = survives.nonzero()[:, 0], (~survives).nonzero()[:, 0]
        if not len(inside) or not len(gone):
            continue
        columns = hessian[inside]
        factor, failed = torch.linalg.cholesky_ex(columns[:, inside])
        if int(failed):
            raise ValueError("the statistics of its inputs are not positive definite; pass a larger `damping`.")
        missing = columns[:, gone] @ weight[row, gone]
        found[row, inside] += torch.cholesky_solve(missing[:, None], factor)[:, 0]
    return Solution(found, kept)
