"""Forward passes of a repair: batches through a frozen copy, and what layers are given on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pruning.scores.readings.network import Network
from pruning.scores.readings.per_example import patches
from pruning.scores.readings.scoring_data import Loss, ScoringInput, weighted_batches


def passes(repair: str, net: Network, given: ScoringInput) -> Iterator[float]:
    """Run each batch through the copy without gradients; yield its weight afterwards.

    Raises:
        ValueError: there is no data, or no loss to run it by.
    """
    for batch, weight in weighted_batches(repair, given.batches, given.size):
        run(repair, net.model, given.loss, batch)
        yield weight


def run(repair: str, model: nn.Module, loss: Loss, batch: Any) -> None:
    """Call the model on one batch as the loss does."""
    if loss is None:
        raise ValueError(f"`loss` (=None) must be a function (model, batch) -> mean loss, by which `{repair}` runs.")
    with torch.no_grad():
        loss(model, batch)


def is_layer(module: nn.Module) -> bool:
    """Say whether `rows_of` knows what a layer multiplies its weight with."""
    return isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)


def rows_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return what each row of a layer's weight is multiplied with: (groups, positions, weights of a row), float64.

    Of a linear layer these are its inputs, of a convolution the patches of them.
    """
    inputs = inputs.detach().to(torch.float64)
    if not isinstance(module, _ConvNd):
        return inputs.flatten(0, -2)[None]
    cut = patches(inputs, module)
    return cut.view(*cut.shape[:2], module.groups, -1).permute(2, 0, 1, 3).flatten(1, 2)
