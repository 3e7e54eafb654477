"""Recomputed running statistics of BatchNorm layers for the pruned network."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from pruning.repair.passes import passes
from pruning.scores.readings.network import network
from pruning.scores.readings.scoring_data import ScoringInput


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
