"""Budgets for dependency groups: channels are removed in one order over the network until the target is met.

The order is by score ("global"), or by a channel's rank in its group as a fraction of the group ("layer"), so that
every group loses the same fraction. Among equal channels, the lowest index is removed first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pruning.choices.axes import Budget
from pruning.dependencies.dependency_groups import DependencyGroup, DependencyGroups

TINY = 1e-9
"""Tolerance for rounding errors, relative to the budget: 0.29 of 100 must count as 29."""


def kept_channels(
    groups: DependencyGroups,
    sparsity: float,
    scores: Mapping[str, Tensor],
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return name of a group -> bool for each channel: the channels to keep so that `sparsity` is reached.

    As few channels as possible are removed: one step less would miss the target. A step is one channel, or the number
    that `scope.round_to` removes at once.

    Args:
        groups: dependency groups; their `scope` holds the budget, the rounding and the minimum to keep.
        sparsity: fraction of `scope.budget` removed in the end, including channels pruned before.
        scores: name of a group -> score of each channel; the lowest scores are removed first.
        alive: name of a group -> bool for each channel: whether it may be kept; None: `groups.alive()`.

    Raises:
        ValueError: the sparsity cannot be reached, or the score of a channel that is alive is NaN.
    """
    alive = alive or groups.alive()
    for name, values in scores.items():
        if bool((values.isnan() & alive[name]).any()):
            raise ValueError(
                f"scores of {name!r} are NaN for channels that are not pruned; scores must be numbers: correct the "
                "values of the tensor."
            )
    own = {group.name: _own_order(scores[group.name], alive[group.name]) for group in groups}
    order = _order(groups, scores, alive)

    def after(count: int) -> dict[str, Tensor]:
        gone = torch.bincount(order[:count], minlength=len(groups.sizes)).tolist()
        return {
            group.name: _kept(groups, group, own[group.name], alive[group.name], gone[number])
            for number, group in enumerate(groups)
        }

    budget = groups.scope.budget
    whole = groups.remaining({name: torch.ones(size, dtype=torch.bool) for name, size in groups.sizes.items()}, budget)
    most = whole - sparsity * whole + TINY * whole
    fewest, enough = 0, len(order)
    if groups.remaining(after(enough), budget) > most:
        raise ValueError(_unreachable(budget, sparsity, groups.remaining(after(enough), budget), whole, groups))
    while fewest < enough:
        middle = (fewest + enough) // 2
        if groups.remaining(after(middle), budget) <= most:
            enough = middle
        else:
            fewest = middle + 1
    return after(enough)


def gone(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the removed fraction of the budget."""
    whole = {name: torch.ones(size, dtype=torch.bool) for name, size in groups.sizes.items()}
    budget = groups.scope.budget
    return 1 - groups.remaining(kept, budget) / max(1, groups.remaining(whole, budget))


def largest_step(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the largest fraction of the budget that one step of removed channels takes, over all groups.

    `gone` exceeds the requested sparsity by less than this fraction.
    """
    whole = {name: torch.ones(size, dtype=torch.bool) for name, size in groups.sizes.items()}
    budget, most = groups.scope.budget, 0
    for group in groups:
        lost = (~kept[group.name]).nonzero().flatten()[: _step(groups, group)]
        back = {**kept, group.name: kept[group.name].index_fill(0, lost, True)}
        touched = {member.tensor for member in group.members}
        most = max(most, groups.remaining(back, budget, touched) - groups.remaining(kept, budget, touched))
    return most / max(1, groups.remaining(whole, budget))


def _unreachable(budget: Budget, sparsity: float, left: int, whole: int, groups: DependencyGroups) -> str:
    return (
        f"`sparsity` (={sparsity}) cannot be reached: it must be at most {1 - left / whole:.6g} of the {budget} with "
        f"`scope.min_kept` (={groups.scope.min_kept}; each group keeps at least one channel) and `scope.round_to` "
        f"(={groups.scope.round_to}); type a lower value for one of the three."
    )


def _own_order(scores: Tensor, alive: Tensor) -> Tensor:
    """Return the channels of a group in the order of removal: dead channels first, then by ascending score."""
    order = scores.cpu().sort(stable=True).indices
    return order[alive[order].to(torch.uint8).sort(stable=True).indices]


def _order(groups: DependencyGroups, scores: Mapping[str, Tensor], alive: Mapping[str, Tensor]) -> Tensor:
    """Return the group number of each channel of the network, in the order of removal."""
    numbers = torch.cat([torch.full((group.units,), number) for number, group in enumerate(groups)])
    if groups.scope.kind == "global":
        everything = torch.cat([scores[group.name].cpu() for group in groups])
        return numbers[_own_order(everything, torch.cat([alive[group.name] for group in groups]))]
    shares = torch.cat([torch.arange(1, group.units + 1).double() / group.units for group in groups])
    return numbers[shares.sort(stable=True).indices]


def _kept(groups: DependencyGroups, group: DependencyGroup, own: Tensor, alive: Tensor, gone: int) -> Tensor:
    """Return which channels of a group are kept after removing `gone` of them; the kept count is rounded up."""
    step = _step(groups, group)
    count = max(group.units - gone, groups.scope.min_kept, 1)
    count = min(-(-count // step) * step, group.units, int(alive.sum()))
    kept = torch.ones(group.units, dtype=torch.bool)
    kept[own[: group.units - count]] = False
    return kept


def _step(groups: DependencyGroups, group: DependencyGroup) -> int:
    """Return how many channels of a group are removed at once."""
    return groups.scope.round_to // math.gcd(groups.scope.round_to, group.width)
