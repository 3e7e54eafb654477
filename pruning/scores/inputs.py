"""Wanda: weights by the norms of what they are multiplied with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from pruning.scores.data import Batches, Loss, Size, tensors, weighed
from pruning.scores.network import Masks, Network, network
from pruning.scores.per_example import patches


def wanda(
    model: nn.Module,
    batches: Batches,
    loss: Loss = None,
    *,
    size: Size = None,
    generator: torch.Generator | None = None,
    masks: Masks | None = None,
    parameters: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    """Score each entry by its magnitude and the norm of its input (Sun et al. 2023, arXiv 2306.11695).

        score_ij = |v_ij| ||X_j||_2         X_j input j of the layer, over all examples and positions

    Scores compare within a row, the weights of one output. Inputs are those of one pass of the network as it is, with
    BatchNorm in evaluation mode; those of a convolution are its patches, of which each entry is multiplied with one
    weight of a filter.

    Args and errors: see `pruning.scores`; `size` and `generator` are unused. `loss` says how the network is called;
    None calls it with a batch's first tensor, or with a dict by name.

    Raises:
        ValueError: a weight is tied, or its layer acts more than once in a pass, or does not show what it reads (as the
            projections of `nn.MultiheadAttention`).
    """
    with network(model, masks, parameters) as net, torch.no_grad():
        _refuse_tied(net)
        squares: dict[str, Tensor] = {}
        with _reading(net, squares) as seen:
            for batch, _ in weighed("wanda", batches, size):
                seen.clear()
                _pass(net.model, loss, batch)
        if unseen := [name for name in net.parameters if name not in squares]:
            raise ValueError(
                f"`parameters` (of {unseen[0]!r}) must belong to linear and convolutional layers that the network "
                "calls, for `wanda` to see their inputs; name those alone."
            )
        norms = {name: sums.sqrt_() for name, sums in squares.items()}
        return {n: p.detach().to(torch.float64, copy=True).abs_().mul_(norms[n]) for n, p in net.parameters.items()}


def _pass(model: nn.Module, loss: Loss, batch: Any) -> None:
    if loss is not None:
        loss(model, batch)
    elif isinstance(batch, Mapping):
        model(**batch)
    else:
        model(next(tensors(batch)))


def _refuse_tied(net: Network) -> None:
    names = {id(parameter): name for name, parameter in net.parameters.items()}
    owners = Counter(id(p) for module in net.model.modules() for p in module._parameters.values() if p is not None)
    for key, name in names.items():
        if owners[key] > 1:
            raise ValueError(
                f"`model` (whose {name!r} is tied) must have each weight in one layer alone for `wanda`, which reads "
                "that layer's inputs; leave it out of `parameters`."
            )


@contextmanager
def _reading(net: Network, squares: dict[str, Tensor]) -> Iterator[set[str]]:
    """Add the squares of what each layer reads to `squares`, of shapes that broadcast to its weight's.

    Yields the names of the layers that have acted in this pass, to be cleared before the next.
    """
    names = {id(parameter): name for name, parameter in net.parameters.items()}
    seen: set[str] = set()

    def read(module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Tensor) -> None:
        name = names[id(module._parameters["weight"])]
        if name in seen:
            raise ValueError(
                f"`model` (whose {name!r} acts more than once in a pass) must call a layer once for `wanda`, which "
                "reads its inputs; leave it out of `parameters`."
            )
        seen.add(name)
        own = _squares(module, given[0] if given else named["input"], output)
        squares[name] = squares[name].add_(own) if name in squares else own

    handles = [
        module.register_forward_hook(read, prepend=True, with_kwargs=True)
        for module in net.model.modules()
        if id(module._parameters.get("weight")) in names
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _squares(module: nn.Module, inputs: Tensor, output: Tensor) -> Tensor:
    """Return the sum of squares of what each weight is multiplied with, of a shape that broadcasts to the weight's."""
    if not isinstance(module, _ConvNd):
        sums = _sum_of_squares(inputs.reshape(-1, inputs.shape[-1]))
        return sums[:, None] if type(module).__name__ == "Conv1D" else sums
    spatial = len(module.kernel_size)
    sums = _sum_of_squares(inputs.reshape(-1, *inputs.shape[-1 - spatial :]))  # before patches: so those are few
    kernel, groups = module.kernel_size, module.groups
    if isinstance(module, _ConvTransposeNd):  # a weight acts at each position whose result is not cut off
        acts = patches(sums.new_ones(1, 1, *output.shape[-spatial:]), module)[0]
        return torch.matmul(sums.flatten(1), acts).view(module.in_channels, 1, *kernel)
    by_group = patches(sums[None], module)[0].sum(0).view(groups, module.in_channels // groups, *kernel)
    return torch.repeat_interleave(by_group, module.out_channels // groups, 0)


def _sum_of_squares(inputs: Tensor) -> Tensor:
    """Return the sum of squares over the first dimension, float64."""
    return inputs.to(torch.float64, copy=True).square_().sum(0)
