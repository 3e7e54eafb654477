"""Masks that stay, and random masks with which sparse trainings begin."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from pruning.choices.axes import Schedule, Scope, Score
from pruning.choices.combining import Choices
from pruning.dynamics.changing_masks import Dynamics
from pruning.engine.plans import plan
from pruning.masks.mask_set import MaskSet


class Static(Dynamics):
    """Keep the masks of the beginning, for example random ones with ERK densities.

    Source: Evci et al. 2020, arXiv 1911.11134 (the baseline "static").
    """

    keeps_counts = True
    nested = True


def random_masks(
    model: nn.Module,
    sparsity: float,
    *,
    allocation: str = "erk",
    parameters: Iterable[str] | None = None,
    generator: torch.Generator | None = None,
) -> MaskSet:
    """Draw random masks for a network, with a total sparsity and the densities of an allocation.

    Args:
        model: the network; it is not changed.
        sparsity: fraction of all entries that is pruned, in [0, 1).
        allocation: densities of the tensors: "erk", "er", "uniform" or another name of `Scope.allocation`.
        parameters: names of the parameters to prune; None: the weights of linear and convolutional layers.
        generator: source of random draws; None: torch's default generator.

    Raises:
        ValueError: the allocation is unknown, or cannot reach the sparsity.
    """
    choices = Choices(Score("random"), scope=Scope("layer", allocation), schedule=Schedule(sparsity))
    return plan(model, choices, parameters=parameters, generator=generator).masks
