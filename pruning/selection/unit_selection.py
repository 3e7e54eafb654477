"""Selection of the units that each pool keeps: an exact count, and of equal scores the higher indices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pruning.selection.selection_groups import Groups, Layout
from pruning.selection.smallest import best_of_pools, prune_smallest_


def select(
    scores: Mapping[str, Tensor],
    groups: Groups,
    counts: Mapping[str, int],
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return name -> bool for each unit, whether it is kept; `Groups.expand` turns the result into masks.

    Args:
        scores: name -> score of each unit, as from `Groups.reduce`; signed scores keep their sign.
        groups: the units.
        counts: name -> units that each pool keeps, as from `allocate`; a pool with fewer survivors keeps them all.
        alive: name -> bool for each unit, whether it may be kept; None means all.

    Raises:
        ValueError: a survivor's score is NaN; the message names the tensor.
    """
    kept = {}
    for layout in groups:
        name = layout.name
        keep = torch.ones(layout.units, dtype=torch.bool) if alive is None else alive[name].clone()
        values = scores[name].detach().cpu()
        if layout.pool < layout.units:
            kept[name] = _by_pool(layout, values, keep, counts[name])
            continue
        survivors = int(keep.sum())
        try:
            kept[name] = prune_smallest_(keep, values, max(0, survivors - counts[name]))
        except ValueError as error:
            raise ValueError(f"Pruning {name}: {error}") from error
    return kept


def _by_pool(layout: Layout, scores: Tensor, alive: Tensor, count: int) -> Tensor:
    """Keep the `count` best survivors of each pool, all pools at once."""
    if bool((scores.isnan() & alive).any()):
        raise ValueError(f"Pruning {layout.name}: its scores hold NaN where an entry is unpruned; repair the tensor.")
    return best_of_pools(scores.view(-1, layout.pool), alive.view(-1, layout.pool), count).view(-1)
