"""Which channels of dependency groups a budget leaves, by one order over the network.

The order is by score ("global"), or by a channel's rank in its group as a fraction of the group ("layer"), so that
every group loses the same share. Channels go in that order until the target is met; of equal ones the lowest index goes
first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from pruning.choices.axes import Budget
from pruning.dependencies.dependency_groups import DependencyGroup, DependencyGroups

TINY = 1e-9
"""What arithmetic may lose: .29 of 100 is 29."""


def kept_channels(
    groups: DependencyGroups,
    sparsity: float,
    scores: Mapping[str, Tensor],
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return name of a group -> bool for each channel: what is kept so that `sparsity` of the budget is gone.

    One step less would miss it: one channel, or as many as `scope.round_to` takes at once.

    Args:
        groups: with the `scope` that says the budget, rounding, and the least that is kept.
        sparsity: the fraction of `scope.budget` that is gone in the end, what was pruned before counted.
        scores: name of a group -> score of each channel; the lowest go first.
        alive: name of a group -> bool for each channel, whether it may be kept; None is all.

    Raises:
        ValueError: it cannot be reached, or scores are NaN.
    """
    alive = alive or groups.alive()
    for name, values in scores.items():
        if bool((values.isnan() & alive[name]).any()):
            raise ValueError(f"Pruning {name}: its scores hold NaN where a channel is unpruned; mend the tensor.")
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
    """Return the fraction of the budget that is gone."""
    whole = {name: torch.ones(size, dtype=torch.bool) for name, size in groups.sizes.items()}
    budget = groups.scope.budget
    return 1 - groups.remaining(kept, budget) / max(1, groups.remaining(whole, budget))


def largest_step(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the largest fraction of the budget that comes back with the last step of a group: by less `gone` exceeds
    what was asked for.
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
        f"`sparsity` (={sparsity}) cannot be reached: {1 - left / whole:.6g} of the {budget} go at most with "
        f"`scope.min_kept` (={groups.scope.min_kept}; a channel of each group stays in any case) and `scope.round_to` "
        f"(={groups.scope.round_to}); lower one."
    )


def _own_order(scores: Tensor, alive: Tensor) -> Tensor:
    """Return the channels of a group in the order in which they go: the dead, then the lowest scores."""
    order = scores.cpu().sort(stable=True).indices
    return order[alive[order].to(torch.uint8).sort(stable=True).indices]


def _order(groups: DependencyGroups, scores: Mapping[str, Tensor], alive: Mapping[str, Tensor]) -> Tensor:
    """Return the number of the group of each channel, in the order in which all go."""
    numbers = torch.cat([torch.full((group.units,), number) for number, group in enumerate(groups)])
    if groups.scope.kind == "global":
        everything = torch.cat([scores[group.name].cpu() for group in groups])
        return numbers[_own_order(everything, torch.cat([alive[group.name] for group in groups]))]
    shares = torch.cat([torch.arange(1, group.units + 1).double() / group.units for group in groups])
    return numbers[shares.sort(stable=True).indices]


def _kept(groups: DependencyGroups, group: DependencyGroup, own: Tensor, alive: Tensor, gone: int) -> Tensor:
    """Return what is kept of a group once `gone` of its channels have been named, rounded up to what may be kept."""
    step = _step(groups, group)
    count = max(group.units - gone, groups.scope.min_kept, 1)
    count = min(-(-count // step) * step, group.units, int(alive.sum()))
    kept = torch.ones(group.units, dtype=torch.bool)
    kept[own[: group.units - count]] = False
    return kept


def _step(groups: DependencyGroups, group: DependencyGroup) -> int:
    """Return how many channels of a group go at once."""
    return groups.scope.round_to // math.gcd(groups.scope.round_to, group.width)
