"""Controls: baselines that a mask or a ranking must beat (Frankle et al. 2021, arXiv 2009.08576)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pruning.dependencies.dependency_groups import DependencyGroups
from pruning.selection.selection_groups import Groups


def shuffle(
    kept: Mapping[str, Tensor],
    groups: Groups | DependencyGroups,
    generator: torch.Generator | None = None,
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Permute at random which units are kept, within each tensor (or row, or window); counts do not change.

    Args:
        kept: name -> bool for each unit, as `select` returns.
        groups: layout of the units.
        generator: source of the permutations; None: torch's default generator.
        alive: name -> bool for each unit: only these units are permuted, so nested masks stay nested; None: all.
    """
    shuffled = {}
    for layout in groups:
        mask = kept[layout.name].view(-1, layout.pool)
        open_to = torch.ones_like(mask) if alive is None else alive[layout.name].view(-1, layout.pool)
        keys = torch.rand(mask.shape, generator=generator, dtype=torch.float64)
        # Survivors of a pool in their own order, and in a random order.
        places = torch.where(open_to, 0.0, 2.0).double().sort(dim=1, stable=True).indices
        drawn = torch.where(open_to, keys, 2.0).sort(dim=1, stable=True).indices
        values = mask.gather(1, places)
        shuffled[layout.name] = torch.zeros_like(mask).scatter_(1, drawn, values).view(-1)
    return shuffled


def inverted(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return scores with opposite signs, so that the highest scores are pruned first; unsigned ones as float64."""
    return {name: -(values if values.dtype.is_signed else values.to(torch.float64)) for name, values in scores.items()}
