"""Per-example gradients of a batch without a loop, from the inputs of layers and the gradients of their outputs.

For a layer y = W x, the gradient of example i is d_i^T x_i with d = dL/dy; for a convolution, x_i holds the patches of
the input. Examples pass through the network one by one where this does not hold: another kind of layer uses the weight,
or examples do not lie along the first dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from pruning.layouts import LINEAR, TRANSPOSED_LINEAR, has_plain_forward, kind_of
from pruning.scores.readings.network import Network, layer_calls
from pruning.scores.readings.scoring_data import (
    ScoringInput,
    Size,
    example_count,
    gradients,
    leaf_uses,
    loss_of,
    weighted_batches,
)

AT_ONCE = 1 << 22
"""Gradient entries held in memory at a time."""

Forward = Callable[[Any], Tensor]
"""(batch) -> the tensor to differentiate: the network's loss or outputs for the batch."""


@dataclass(frozen=True)
class _Call:
    """One call of a layer: its inputs, its output, and the graph edge that receives the output's gradient."""

    module: nn.Module
    inputs: Tensor
    output: Tensor
    edge: GradientEdge


@dataclass(frozen=True)
class BatchPass:
    """A forward pass of a batch of `count` examples; `result` is the tensor to differentiate.

    `factors`, shape (count,), scale the gradients of examples of unequal weights: `count` times an example's scaled
    gradient is sqrt(its weight / mean weight) times the gradient of its own mean loss. None if all weights are equal.
    """

    net: Network
    count: int
    result: Tensor
    calls: Mapping[str, Sequence[_Call]] | None
    factors: Tensor | None = None

    def square_sums(self, cotangent: Tensor | None = None, signs: Tensor | None = None) -> list[Tensor]:
        """Return, for each weight, the sum over examples of the squared gradients of `result`.

        Args:
            cotangent: tensor of the shape of `result`; None if `result` is a single number.
            signs: factors of the examples' squares, shape (count,); None is 1 for each.
        """
        if self.calls is None:
            scale = 1.0 if signs is None else signs[0]
            return [g.square_().mul_(scale) for g in self._gradients(cotangent)]
        deltas = self._deltas(cotangent)
        return [self._squares_of(name, deltas[name], signs) for name in self.net.parameters]

    def rows(self) -> list[Tensor]:
        """Return, for each weight, the gradients of `result` of all examples, shape (count, *shape)."""
        if self.calls is None:
            return [g.unsqueeze(0) for g in self._gradients(None)]
        deltas = self._deltas(None)
        found = [self._rows_of(name, deltas[name], slice(None)) for name in self.net.parameters]
        if self.factors is not None:
            for own in found:
                own.mul_(self.factors.view(-1, *[1] * (own.dim() - 1)))
        return found

    def gates(self, name: str) -> Tensor:
        """Return d result / d z, shape (examples, units), for gates z = 1 on the outputs of a weight's layer."""
        if self.calls is None:
            raise ValueError(
                f"`parameters` (={name!r}) must name weights of layers that read examples along their first dimension "
                "for `per_example=True`; pass `per_example=False`."
            )
        total = self.result.new_zeros(())
        for call, delta in zip(self.calls[name], self._deltas(None)[name], strict=True):
            total = total + _by_unit(call.output * delta, call.module)
        return total if self.factors is None else total * self.factors[:, None]

    def _gradients(self, cotangent: Tensor | None) -> Sequence[Tensor]:
        return gradients(self.result, list(self.net.parameters.values()), cotangent, retain_graph=True)

    def _deltas(self, cotangent: Tensor | None) -> dict[str, list[Tensor]]:
        assert self.calls is not None
        calls = [call for of_weight in self.calls.values() for call in of_weight]
        edges = [call.edge for call in calls]
        found = torch.autograd.grad(self.result, edges, cotangent, retain_graph=True, allow_unused=True)
        deltas = iter(
            torch.zeros_like(call.output) if delta is None else delta.view_as(call.output)
            for call, delta in zip(calls, found, strict=True)
        )
        return {name: [next(deltas) for _ in of_weight] for name, of_weight in self.calls.items()}

    def _rows_of(self, name: str, deltas: Sequence[Tensor], part: slice) -> Tensor:
        assert self.calls is not None
        shape = self.net.parameters[name].shape
        total: Tensor | None = None
        for call, delta in zip(self.calls[name], deltas, strict=True):
            own = _rows(call, delta, part).reshape(-1, *shape)
            total = own if total is None else total.add_(own)
        return self.net.parameters[name].new_zeros(self.count, *shape)[part] if total is None else total

    def _squares_of(self, name: str, deltas: Sequence[Tensor], signs: Tensor | None) -> Tensor:
        assert self.calls is not None
        calls, weight = self.calls[name], self.net.parameters[name]
        if len(calls) == 1 and calls[0].inputs.dim() == 2:
            squares = deltas[0].square()
            squares = squares if signs is None else squares.mul_(signs[:, None])
            read = calls[0].inputs.square()
            return read.T @ squares if kind_of(calls[0].module) is TRANSPOSED_LINEAR else squares.T @ read
        total = torch.zeros_like(weight, requires_grad=False)
        step = max(1, AT_ONCE // max([weight.numel(), *(_patch_entries(call) for call in calls)]))
        for start in range(0, self.count, step):
            part = slice(start, start + step)
            own = self._rows_of(name, deltas, part).square_()
            total += own.sum(0) if signs is None else torch.tensordot(signs[part], own, 1)
        return total


def batch_passes(
    net: Network, batch: Any, weight: float, forward: Forward, size: Size = None
) -> Iterator[tuple[BatchPass, float]]:
    """Run a batch through the network; yield (pass, weight) of the batch, or of each example if layers hide them.

    Args:
        net: without BatchNorm in training mode, which makes examples depend on each other.
        batch: the examples.
        weight: weight of the whole batch.
        forward: see `Forward`.
        size: (batch) -> its weight. An example weighs `size(example)` if these add up to `weight`, else weight / count.
    """
    count = example_count(batch)
    shares = _shares(batch, count, weight, size)
    calls: dict[str, list[_Call]] = {name: [] for name in net.parameters}

    def note(name: str, module: nn.Module, inputs: Tensor, output: Tensor) -> None:
        if output.requires_grad:
            edge = get_gradient_edge(_unviewed(output))
            calls[name].append(_Call(module, inputs.detach(), output.detach(), edge))

    with layer_calls((each for each in net.layers() if _is_known(each[1])), note, prepend=True):
        result = forward(batch)
    of_examples = not result.dim() or len(result) == count
    fit = of_examples and all(_fits(call, count) for of_weight in calls.values() for call in of_weight)
    fit = fit and _are_all_uses(result, net, calls)
    if fit or count == 1:
        yield BatchPass(net, count, result, calls if fit else None, _factors(shares, result)), weight
        return
    for index in range(count):
        if shares[index] > 0:
            yield from batch_passes(net, _example(batch, index, count), shares[index], forward)


def example_passes(
    score: str, net: Network, given: ScoringInput, forward: Forward | None = None
) -> Iterator[tuple[BatchPass, float]]:
    """Run all batches through the network, by the loss or by `forward`; see `batch_passes`."""
    forward = forward or (lambda batch: loss_of(score, given.loss, net.model, batch))
    for batch, weight in weighted_batches(score, given.batches, given.size):
        yield from batch_passes(net, batch, weight, forward, given.size)


def _shares(batch: Any, count: int, weight: float, size: Size) -> list[float]:
    """Return the weight of each example: its `size`, or an equal part if sizes do not add up to the batch's weight."""
    if size is not None:
        shares = [float(size(_example(batch, index, count))) for index in range(count)]
        if abs(sum(shares) - weight) <= 1e-9 * weight:
            return shares
    return [weight / count] * count


def _factors(shares: Sequence[float], like: Tensor) -> Tensor | None:
    if min(shares) == max(shares):
        return None
    mean = sum(shares) / len(shares)
    roots = [(mean / share) ** 0.5 if share > 0 else 0.0 for share in shares]
    return torch.tensor(roots, dtype=like.dtype, device=like.device)


def _unviewed(output: Tensor) -> Tensor:
    """Return the base of an output that views all of it: a later in-place change takes the view out of the graph."""
    base = output._base
    return output if base is None or base.numel() != output.numel() else base


def _is_known(module: nn.Module) -> bool:
    kind = kind_of(module)
    return kind is not None and kind.by_call and has_plain_forward(module)


def _fits(call: _Call, count: int) -> bool:
    """Return whether the examples lie along the first dimension of the call's inputs."""
    least = 2 + len(call.module.kernel_size) if isinstance(call.module, _ConvNd) else 2
    return len(call.inputs) == count and call.inputs.dim() >= least


def _are_all_uses(result: Tensor, net: Network, calls: Mapping[str, Sequence[_Call]]) -> bool:
    """Return whether `result` depends on each weight only through these calls."""
    used = leaf_uses(result)
    return all(used[id(parameter)] <= len(calls[name]) for name, parameter in net.parameters.items())


def _example(batch: Any, index: int, count: int) -> Any:
    """Return the example at `index` as a batch of one."""
    if isinstance(batch, Tensor):
        return batch[index : index + 1] if batch.dim() and len(batch) == count else batch
    if isinstance(batch, Mapping):
        return {name: _example(value, index, count) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_example(value, index, count) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(_example(value, index, count) for value in batch)
    return batch


# --- layers -----------------------------------------------------------------------------------------------------------


def _rows(call: _Call, delta: Tensor, part: slice) -> Tensor:
    """Return the gradients of the layer's weight for each example in `part`, in the order of the weight's entries."""
    inputs, delta = call.inputs[part], delta[part]
    if isinstance(call.module, _ConvTransposeNd):
        return _products(inputs.flatten(2), patches(delta, call.module), call.module.groups)
    if isinstance(call.module, _ConvNd):
        return _products(delta.flatten(2), patches(inputs, call.module), call.module.groups)
    inputs, delta = inputs.reshape(len(inputs), -1, inputs.shape[-1]), delta.reshape(len(delta), -1, delta.shape[-1])
    return inputs.mT @ delta if kind_of(call.module) is TRANSPOSED_LINEAR else delta.mT @ inputs


def _products(outer: Tensor, patched: Tensor, groups: int) -> Tensor:
    """Multiply outer (b, rows, positions) by patches (b, positions, columns) within each group."""
    count, _, positions = outer.shape
    outer = outer.reshape(count, groups, -1, positions)
    return outer @ patched.view(count, positions, groups, -1).transpose(1, 2)


def patches(inputs: Tensor, module: _ConvNd) -> Tensor:
    """Return the patches that a convolution multiplies with its weight: (examples, positions, channels * kernel)."""
    views, spatial = windows(inputs, module), len(module.kernel_size)
    positions, kernel = range(2, 2 + spatial), range(2 + spatial, 2 + 2 * spatial)
    entries = views.shape[1] * torch.Size(module.kernel_size).numel()
    return views.permute(0, *positions, 1, *kernel).reshape(len(views), -1, entries)


def windows(inputs: Tensor, module: _ConvNd) -> Tensor:
    """Return the patches as a view of the padded inputs: (examples, channels, *positions, *kernel)."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    views = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    for dim, (size, stride, dilation) in enumerate(
        zip(module.kernel_size, module.stride, module.dilation, strict=True)
    ):
        views = views.unfold(2 + dim, dilation * (size - 1) + 1, stride)[..., ::dilation]
    return views


def _patch_entries(call: _Call) -> int:
    if not isinstance(call.module, _ConvNd):
        return call.inputs[0].numel()
    read, returned = call.inputs[0].numel(), call.output[0].numel() // call.output.shape[1] * call.inputs.shape[1]
    return max(read, returned) * torch.Size(call.module.kernel_size).numel()


def _by_unit(products: Tensor, module: nn.Module) -> Tensor:
    """Sum over positions: return shape (examples, units)."""
    if kind_of(module) in (LINEAR, TRANSPOSED_LINEAR):
        return products.flatten(1, -2).sum(1) if products.dim() > 2 else products
    return products.flatten(2).sum(2)
