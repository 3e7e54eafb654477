"""Which units each pool keeps: exactly as many as it is told, of equal scores the higher indices."""

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
    """Return name -> bool for each unit: whether it is kept. `Groups.expand` makes masks of it.

    Arguments:
        scores: name -> score of each unit, as `Groups.reduce` gives them; signed ones rank as they are.
        groups: the units.
        counts: name -> how many each pool keeps, as `allocate` gives them; a pool in which fewer survive keeps these.
        alive: name -> bool for each unit, whether it may be kept; None is all.

    Raises:
        ValueError: a survivor's score is NaN; the tensor is named.
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
        raise ValueError(f"Pruning {layout.name}: its scores hold NaN where an entry is unpruned; mend the tensor.")
    return best_of_pools(scores.view(-1, layout.pool), alive.view(-1, layout.pool), count).view(-1)
