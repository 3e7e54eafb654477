"""Forward passes of repairs through a frozen copy, and the statistics of BatchNorm layers that they recompute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from pruning.scores.readings.network import Network, network
from pruning.scores.readings.per_example import patches
from pruning.scores.readings.scoring_data import Loss, ScoringInput, weighted_batches


def passes(repair: str, net: Network, given: ScoringInput) -> Iterator[float]:
    """Run each batch through the copy without gradients, then yield the batch's weight.

    Raises:
        ValueError: there is no data, or no loss to call the network.
    """
    for batch, weight in weighted_batches(repair, given.batches, given.size):
        run(repair, net.model, given.loss, batch)
        yield weight


def run(repair: str, model: nn.Module, loss: Loss, batch: Any) -> None:
    """Call the model on one batch by calling the loss."""
    if loss is None:
        raise ValueError(
            f"`loss` (=None) must be a function (model, batch) -> mean loss, with which `{repair}` calls the model."
        )
    with torch.no_grad():
        loss(model, batch)


def is_layer(module: nn.Module) -> bool:
    """Return whether `rows_of` supports a layer."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def rows_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the vectors that multiply the rows of a layer's weight: (groups, positions, weights of a row), float64.

    The vectors are the inputs of a linear layer, or the patches of a convolution's inputs.
    """
    return laid_out(module, inputs.detach().to(torch.float64))


def laid_out(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return the inputs of a layer as `rows_of`, in their own dtype."""
    if not isinstance(module, _ConvNd):
        return inputs.flatten(0, -2)[None]
    cut = patches(inputs, module)
    return cut.view(*cut.shape[:2], module.groups, -1).permute(2, 0, 1, 3).flatten(1, 2)


def bn_stats(
    given: ScoringInput,
    kept: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Recompute the running means and variances of BatchNorm layers in the pruned network, as means over the batches.

    Args:
        given: the network and masks before this pruning; all batches weigh the same.
        kept: name -> mask after this pruning, nonzero where an entry is kept, of the parameter's shape.

    Returns:
        name of a buffer -> its new value.

    Raises:
        ValueError: the network has no BatchNorm layer that keeps statistics.
    """
    with network(given.model, {**(given.masks or {}), **kept}, kept, batch_norm="train") as net:
        layers = {
            path: module
            for path, module in net.model.named_modules()
            if isinstance(module, _BatchNorm) and isinstance(module.running_mean, Tensor)
        }
        if not layers:
            raise ValueError(
                f"`repair.kind` (='bn_stats') needs a BatchNorm layer with running statistics, and "
                f"{type(given.model).__name__} has none; choose another repair."
            )
        for module in layers.values():
            module.reset_running_stats()
            module.momentum = None  # selects a cumulative mean
        for _ in passes("bn_stats", net, given):
            pass
        return {
            f"{path}.{name}" if path else name: buffer.detach().clone()
            for path, module in layers.items()
            for name, buffer in module.named_buffers(recurse=False)
            if name != "num_batches_tracked" and torch.is_tensor(buffer)
        }
