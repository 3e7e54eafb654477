"""Which entries to prune: exactly the k smallest, or exactly k at random, of what a mask still keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def prune_smallest_(mask: Tensor, scores: Tensor, count: int, *, magnitude: bool = False) -> Tensor:
    """Zero, in place, the `count` nonzero entries of `mask` with the smallest scores, and return `mask`."""
    prune_smallest_across_([mask], [scores], count, magnitude=magnitude)
    return mask


def prune_random_(mask: Tensor, count: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Zero, in place, a uniformly random subset of exactly `count` nonzero entries of `mask`, and return `mask`."""
    prune_random_across_([mask], count, generator=generator)
    return mask


def prune_smallest_across_(
    masks: Sequence[Tensor], scores: Sequence[Tensor], count: int, *, magnitude: bool = False
) -> None:
    """As `prune_smallest_`, with the entries of all tensors ranked as one."""
    flat, alive = _survivors(masks, count)
    ranked = torch.cat([score.detach().reshape(-1) for score in scores])[alive]
    if ranked.isnan().any():
        raise ValueError("`scores` hold NaN where the mask keeps an entry; mend the weights or mask those entries.")
    order = (ranked.abs() if magnitude else ranked).argsort(stable=True)
    _write(masks, flat.index_fill_(0, alive[order[:count]], 0))


def prune_random_across_(masks: Sequence[Tensor], count: int, *, generator: torch.Generator | None = None) -> None:
    """As `prune_random_`, with the entries of all tensors drawn from as one."""
    flat, alive = _survivors(masks, count)
    order = torch.randperm(alive.numel(), generator=generator)
    _write(masks, flat.index_fill_(0, alive[order[:count].to(alive.device)], 0))


def _survivors(masks: Sequence[Tensor], count: int) -> tuple[Tensor, Tensor]:
    flat = torch.cat([mask.reshape(-1) for mask in masks])
    alive = flat.nonzero().squeeze(1)
    if not 0 <= count <= alive.numel():
        raise ValueError(f"`count` (={count}) must lie between 0 and {alive.numel()}, the entries still unpruned.")
    return flat, alive


def _write(masks: Sequence[Tensor], flat: Tensor) -> None:
    for mask, part in zip(masks, torch.split(flat, [mask.numel() for mask in masks]), strict=True):
        mask.copy_(part.view(mask.shape))
