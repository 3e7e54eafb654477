"""Dependency groups as plain data: channels of several tensors that are removed together, their scores and budgets.

A group has a number of channels, and members: the tensors that hold them. For example, the members of a convolution's
group are its outputs, its bias, the scale and shift of its BatchNorm, and the inputs of the next layer. A channel is
removed from all members or from none.

For a budget, channels are removed in one order over the network until the target is met. The order is by score
("global"), or by a channel's rank in its group as a fraction of the group ("layer"), so that every group loses the same
fraction. Among equal channels, the lowest index is removed first, but of experts the highest.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn

from pruning.choices.axes import EQUAL_WIDTHS, SIZES, Budget, FamilyUnit, Scope, Unit, counts_experts
from pruning.holding.parameter import first_names
from pruning.mixtures.finding import Mixture
from pruning.refused import RefusedValue

NO_EXAMPLE = (
    "`example` (=None) must be an input of the network if `unit.kind` is 'group': dependency groups are found by "
    "tracing the network with it; pass a batch of two inputs or more."
)
"""Refusal to find dependency groups without tracing."""


@dataclass(frozen=True)
class Member:
    """Positions of a group's channels in one tensor.

    Args:
        tensor: name of the parameter or buffer in a plain model.
        channels: int64, the channel number at each position, -1 for positions outside the group; it has the tensor's
            number of dimensions, with size 1 where the channel does not depend on the position.
        masked: whether masks cover these positions. The norms of a removed layer of BERT stay in the masked network,
            which computes nothing without them; the smaller network has none of them.
    """

    tensor: str
    channels: Tensor
    masked: bool = True

    @property
    def dims(self) -> tuple[int, ...]:
        """Dimensions of the tensor along which the channels lie."""
        return tuple(dim for dim, size in enumerate(self.channels.shape) if size > 1)

    def indices(self, channel: int) -> list[int]:
        """Return the positions of a channel; only for members whose channels lie along one dimension."""
        (_,) = self.dims
        return (self.channels.flatten() == channel).nonzero().flatten().tolist()


@dataclass(frozen=True)
class DependencyGroup:
    """Channels that have positions in the same dimensions of the same tensors.

    Args:
        name: name of the first tensor, with #2, #3, ... if an earlier group has the same name.
        units: number of channels, or of heads or convolution groups that are removed as wholes.
        width: smallest number of positions per channel in a member, for example the size of a head.
        members: all tensors that hold these channels.
        counts: numbers of channels of a pool that can be kept, ascending, the last is `pool`; empty: any number.
        keeps_first: whether the lowest index is kept, not removed, among channels of equal scores.
        pools: number of equal runs of consecutive channels, each of which is ranked by itself and keeps equally many:
            the experts of a mixture, for their hidden units.
    """

    name: str
    units: int
    width: int
    members: tuple[Member, ...]
    counts: tuple[int, ...] = ()
    keeps_first: bool = False
    pools: int = 1

    @property
    def pool(self) -> int:
        """Number of channels that are ranked together."""
        return self.units // self.pools


@dataclass(frozen=True)
class Held:
    """Tensor of the network: its shape, the costs of its entries, and the dimension of its outputs.

    If it stacks the parts of experts, `used` is how many of them a token uses, and `applied` counts the multiplications
    of all experts by one entry of theirs: both stay as they are when experts go.
    """

    shape: torch.Size
    itemsize: int
    trained: bool
    applied: int = 0
    outputs: int = 0
    used: int = 0

    def cost(self, budget: Budget) -> int:
        """Return the cost of one entry: 1 if it is a parameter, its bytes, or its number of multiplications."""
        costs = {"parameters": int(self.trained), "bytes": self.itemsize, "macs": self.applied}
        return {**costs, "active_parameters": int(self.trained) * (self.used or 1)}.get(budget, 0)


def held_tensors(
    tensors: Mapping[str, Tensor],
    applied: Mapping[str, int],
    outputs: Mapping[str, int],
    found: Iterable[Mixture] = (),
) -> dict[str, Held]:
    """Return first name of a tensor -> the tensor with its costs.

    Args:
        tensors: name -> each parameter and buffer, under all names of a tied one.
        applied: first name of a weight -> multiplications of each entry; 0 for others.
        outputs: first name of a tensor -> dimension of its outputs; 0 for others.
        found: mixtures of the network.
    """
    first = first_names(tensors)
    used = {name: each.top_k or each.count for each in found for name in each.stacks}
    return {
        name: Held(
            *(t.shape, t.itemsize, isinstance(t, nn.Parameter)),
            *(applied.get(name, 0), outputs.get(name, 0), used.get(name, 0)),
        )
        for name, t in tensors.items()
        if first[name] == name
    }


@dataclass(frozen=True)
class Multiplied:
    """Activations that are multiplied: their shape, multiplications per entry, and positions of channels."""

    shape: torch.Size
    applied: int | Fraction
    members: tuple[tuple[str, Member], ...]


@dataclass(frozen=True)
class DependencyGroups:
    """Dependency groups of a network, in the network's order; `dependency_groups` makes them.

    Args:
        groups: groups of channels that can be removed.
        tensors: name -> every parameter and buffer of the network.
        unit, scope: how channels are scored, and how many are kept.
        products: products of activations, which are not in `tensors`.
        others: groups of other units of the network, which stay as they are; costs count what is left of them.
        others_kept: name of one of them -> bool for each channel: whether it is kept; all are without a name.
        limits: the modules to which the groups are limited, and why; empty if the network is traced whole.
        on_request: matrices of no layer in groups that are left out unless one of their matrices is named.
    """

    groups: tuple[DependencyGroup, ...]
    tensors: Mapping[str, Held]
    unit: Unit
    scope: Scope
    products: tuple[Multiplied, ...] = ()
    others: tuple[DependencyGroup, ...] = ()
    others_kept: Mapping[str, Tensor] = field(default_factory=dict)
    limits: str = ""
    on_request: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[DependencyGroup]:
        return iter(self.groups)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Name of a group -> number of its channels."""
        return {group.name: group.units for group in self.groups}

    @property
    def equal_widths(self) -> bool:
        """Whether all groups keep equal numbers of channels, as the layers of a stock transformer do."""
        return self.scope.uniform or (self.unit.kind in EQUAL_WIDTHS and self.scope.kind == "layer")

    @property
    def to_nearest(self) -> bool:
        """Whether the number of channels to remove is rounded to the nearest one: that of experts."""
        return counts_experts(self.unit, self.scope)

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are members of a group, in the order of the network."""
        members = {member.tensor for group in self.groups for member in group.members if member.masked}
        return tuple(name for name, held in self.tensors.items() if held.trained and name in members)

    def reduce(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name of a group -> score of each channel, float64, from all scored entries of all members.

        An entry counts once in every member that it belongs to: an entry of a residual block's weight may count as an
        output and as an input. `unit.reduce` combines the entries of a channel to its score. `scope.normalise` divides
        the score by the number of entries ("size"), or by the mean of the group ("group"): DepGraph's relative score,
        which makes groups of any size comparable.

        Args:
            scores: name of a parameter -> scores of its shape, or one score per output, shape (outputs,).

        Raises:
            ValueError: no member of a group has scores, or scores have another shape.
        """
        return {group.name: self._reduced(group, scores) for group in self.groups}

    def _reduced(self, group: DependencyGroup, scores: Mapping[str, Tensor]) -> Tensor:
        total, entries = torch.zeros(group.units, dtype=torch.float64), torch.zeros(group.units, dtype=torch.float64)
        for member in group.members:
            given = self._given(member, scores) if member.masked else None
            if given is None:
                continue
            values = {"l1": torch.abs, "l2": torch.square}.get(self.unit.reduce, torch.clone)(given)
            added, here = _summed(values, member.channels), member.channels.flatten() >= 0
            total.index_add_(0, member.channels.flatten()[here], added.flatten()[here])
            each = torch.full_like(added, given.numel() / added.numel())
            entries.index_add_(0, member.channels.flatten()[here], each.flatten()[here])
        if not entries.any():
            raise ValueError(
                f"`scores` must contain a parameter of the group {group.name!r}; add scores of one of "
                f"{', '.join(dict.fromkeys(member.tensor for member in group.members))}."
            )
        if self.scope.normalise == "size":
            total /= entries
        reduced = {"l2": torch.sqrt, "square_of_sum": torch.square}.get(self.unit.reduce, torch.clone)(total)
        if self.scope.normalise == "group" and (mean := float(reduced.mean())):
            reduced = reduced / abs(mean)
        return reduced

    def _given(self, member: Member, scores: Mapping[str, Tensor]) -> Tensor | None:
        """Return the scores of a member's entries, float64 on the CPU; None if the member has none."""
        given = scores.get(member.tensor)
        if given is None:
            return None
        held = self.tensors[member.tensor]
        given = given.detach().to("cpu", torch.float64)
        if given.shape == held.shape:
            return given
        if given.shape != (held.shape[held.outputs],):
            raise ValueError(
                f"`scores[{member.tensor!r}]` has shape {tuple(given.shape)}; it must have the parameter's shape "
                f"{tuple(held.shape)}, or one score per output, shape ({held.shape[held.outputs]},)."
            )
        if member.dims not in ((held.outputs,), ()):
            return None
        return given.reshape([-1 if dim == held.outputs else 1 for dim in range(len(held.shape))])

    def alive(self, masks: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return name of a group -> bool for each channel: whether any of its entries is kept.

        Args:
            masks: name of a parameter -> mask, nonzero where an entry is kept; without masks all channels are alive.
        """
        return self._alive(self.groups, masks or {})

    def beside(self, masks: Mapping[str, Tensor]) -> DependencyGroups:
        """Return these groups in a network whose masks may have emptied channels of `others`, too."""
        return replace(self, others_kept=self._alive(self.others, masks))

    def _alive(self, groups: Sequence[DependencyGroup], masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for group in groups:
            alive = torch.zeros(group.units, dtype=torch.bool)
            for member in group.members:
                mask = masks.get(member.tensor)
                kept = True if mask is None else any_of((mask != 0).cpu(), member.channels)
                if self.tensors[member.tensor].trained and member.masked:
                    alive[member.channels[(member.channels >= 0) & kept]] = True
            found[group.name] = alive
        return found

    def expand(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name of a parameter -> bool of its shape: True where all channels of an entry are kept.

        Args:
            kept: name of a group -> bool for each channel, shape (units,).
        """
        masks = {name: torch.ones(self.tensors[name].shape, dtype=torch.bool) for name in self.parameters}
        for group in self.groups:
            for member in group.members:
                if member.tensor in masks and member.masked:
                    masks[member.tensor] &= _keeps(member, kept[group.name])
        return masks

    def remaining(self, kept: Mapping[str, Tensor], budget: Budget, tensors: Collection[str] | None = None) -> int:
        """Return the exact budget that remains after removing the channels that `kept` does not keep.

        Args:
            kept: name of a group -> bool for each channel.
            budget: "channels" of these groups; "parameters" or "bytes" (with buffers) of the whole network;
                "active_parameters": those that one token uses, with as many experts as it is routed to; "macs":
                multiply-accumulates of the network for the example, as `pruning.measure` counts them, with attention.
            tensors: names of the tensors to count; None: all. Products of activations are always counted, and the
                budget "channels" ignores the names.
        """
        if budget == "channels":
            return sum(int(each.sum()) for each in kept.values())
        return self._left({**self.others_kept, **kept}, budget, tensors)

    def whole(self, budget: Budget) -> int:
        """Return the exact budget of the network with all channels."""
        return sum(self.sizes.values()) if budget == "channels" else self._left({}, budget)

    def _left(self, kept: Mapping[str, Tensor], budget: Budget, tensors: Collection[str] | None = None) -> int:
        left: int | Fraction = sum(
            cost * (self.entries(name, kept) if budget in STORED else self._entries_of_expert(name, kept))
            for name in (self.tensors if tensors is None else tensors)
            if (cost := self.tensors[name].cost(budget))
        )
        if budget == "macs":
            left += sum(each.applied * _entries(each.shape, each.members, kept) for each in self.products)
        return int(left)

    def entries(self, name: str, kept: Mapping[str, Tensor]) -> int:
        """Return how many entries of a tensor remain after removing the channels that `kept` does not keep."""
        return _entries(self.tensors[name].shape, self._by_tensor.get(name, ()), kept)

    def _entries_of_expert(self, name: str, kept: Mapping[str, Tensor]) -> int:
        """Return how many entries of one expert remain, if a tensor stacks their parts; else of the whole tensor."""
        held, members = self.tensors[name], self._by_tensor.get(name, ())
        if not held.used:
            return self.entries(name, kept)
        experts = [(group, member) for group, member in members if member.dims == (0,)]
        return self.entries(name, kept) // max(1, _entries(held.shape[:1], experts, kept))

    @cached_property
    def _by_tensor(self) -> Mapping[str, Sequence[tuple[str, Member]]]:
        found = defaultdict(list)
        for group in (*self.groups, *self.others):
            for member in group.members:
                found[member.tensor].append((group.name, member))
        return found


def _entries(shape: torch.Size, members: Sequence[tuple[str, Member]], kept: Mapping[str, Tensor]) -> int:
    """Count the remaining entries of a tensor; `members` are its pairs (name of a group, member)."""
    masks: dict[tuple[int, ...], Tensor] = {}
    for group, member in members:
        if group in kept:
            keeps = _keeps(member, kept[group])
            masks[member.dims] = masks[member.dims] & keeps if member.dims in masks else keeps
    covered = [dim for dims in masks for dim in dims]
    free = math.prod(size for dim, size in enumerate(shape) if dim not in covered)
    if len(covered) == len({*covered}):
        return free * math.prod(int(mask.sum()) for mask in masks.values())
    together = torch.ones([size if dim in covered else 1 for dim, size in enumerate(shape)], dtype=torch.bool)
    for mask in masks.values():
        together = together & mask
    return free * int(together.sum())


def _keeps(member: Member, kept: Tensor) -> Tensor:
    """Return which positions of a member are kept; positions outside the group are."""
    return torch.cat([kept, torch.ones(1, dtype=torch.bool)])[member.channels]


def _summed(values: Tensor, channels: Tensor) -> Tensor:
    """Sum over the dimensions along which no channels lie."""
    dims = [dim for dim, size in enumerate(channels.shape) if size == 1]
    return values.sum(dims, keepdim=True) if dims else values


def any_of(mask: Tensor, channels: Tensor) -> Tensor:
    """Return whether any entry is True, over the dimensions along which no channels lie."""
    dims = [dim for dim, size in enumerate(channels.shape) if size == 1]
    return mask.any(dims, keepdim=True) if dims else mask


STORED = ("parameters", "bytes")
"""Budgets that count all experts of a mixture; others count those that a token uses."""
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
    own = {group.name: _ranks(group, scores[group.name], alive[group.name]) for group in groups}
    order = _order(groups, scores, alive)

    def after(count: int) -> dict[str, Tensor]:
        if groups.equal_widths:
            gone = [count] * len(groups.sizes)
        else:
            gone = torch.bincount(order[:count], minlength=len(groups.sizes)).tolist()
        return {
            group.name: _kept(groups, group, own[group.name], alive[group.name], gone[number])
            for number, group in enumerate(groups)
        }

    check_reachable(groups, sparsity, alive)
    if groups.to_nearest:
        return after(max(round(sparsity * group.units) for group in groups))
    budget = groups.scope.budget
    whole = groups.whole(budget)
    most = whole - sparsity * whole + TINY * whole
    fewest, enough = 0, max(group.pool for group in groups) if groups.equal_widths else len(order)
    while fewest < enough:
        middle = (fewest + enough) // 2
        if groups.remaining(after(middle), budget) <= most:
            enough = middle
        else:
            fewest = middle + 1
    return after(enough)


def check_reachable(groups: DependencyGroups, sparsity: float, alive: Mapping[str, Tensor] | None = None) -> None:
    """Raise ValueError if the budget cannot be reached, whatever the scores.

    Args:
        groups, sparsity, alive: see `kept_channels`.
    """
    if groups.to_nearest:
        _check_experts(groups, sparsity)
        return
    alive, budget = alive or groups.alive(), groups.scope.budget
    whole, left = groups.whole(budget), _least(groups, alive)
    if left > whole - sparsity * whole + TINY * whole:
        scope, reachable = groups.scope, 1 - left / whole
        lower = [f"`scope.{name}`" for name in ("min_kept", "round_to") if getattr(scope, name) > 1]
        lower = ["sparsity", *lower] if reachable > TINY else lower
        remedy = f"type a lower {', or a lower '.join(lower)}" if lower else "choose another unit, such as 'entry'"
        raise ValueError(
            f"`sparsity` (={sparsity}) cannot be reached: it must be at most {reachable:.6g} of the {budget} "
            f"with `scope.min_kept` (={scope.min_kept}; each group keeps at least one channel) and `scope.round_to` "
            f"(={scope.round_to}); {remedy}."
        )


def _check_experts(groups: DependencyGroups, sparsity: float) -> None:
    """Raise ValueError if fewer experts of a group would be left than its router chooses from."""
    for group in groups:
        left, least = group.units - round(sparsity * group.units), max(group.counts[0], groups.scope.min_kept)
        if left < least:
            parts = sum(each.members[0].tensor == group.members[0].tensor for each in groups)
            among = f"each of the {parts} groups of experts in {group.name!r}" if parts > 1 else repr(group.name)
            most = f"at most {1 - least / group.units:.6g}" if least < group.units else "unit='mlp', as none can go"
            raise ValueError(
                f"`sparsity` (={sparsity}) leaves {left} of the {group.units} experts of {among}, but at least {least} "
                f"must be left for routers to choose from, or by `scope.min_kept`; type {most}."
            )


def fraction_without(groups: DependencyGroups, size: int, alive: Mapping[str, Tensor]) -> float:
    """Return the fraction of the channels to remove so that every layer keeps `size` of them; 0 if it has as many.

    Args:
        groups: dependency groups whose budget is "channels".
        size: number of layers or channels, or of each layer's heads, hidden units or experts (of each group that its
            router chooses first).
        alive: name of a group -> bool for each channel: whether it may be kept.

    Raises:
        RefusedValue: layers have different numbers, or cannot keep so many.
    """
    sizes: list[set[int]] = [{*(group.counts or range(1, group.pool + 1))} for group in groups]
    widths, allowed = sorted({max(each) for each in sizes}), sorted(set.intersection(*sizes))
    if size not in allowed or len(widths) > 1:
        few = allowed if len(allowed) < 20 else [*allowed[:2], "...", allowed[-1]]
        raise RefusedValue(f"unit.{SIZES[cast(FamilyUnit, groups.unit.kind)]}", size).because(
            f"must be a number that all layers can keep: they have {' or '.join(map(str, widths))}, and can keep "
            f"{', '.join(map(str, few))}; without the key they keep all."
        )
    if groups.to_nearest or size in widths:
        return 1 - size / widths[0]
    live = (group.pools for group in groups if bool(alive[group.name].any()))
    return 1.0 - size * sum(live) / sum(groups.sizes.values())


def most_removable(groups: DependencyGroups, alive: Mapping[str, Tensor]) -> float:
    """Return the largest fraction of the budget that can be removed, whatever the scores."""
    budget = groups.scope.budget
    return 1 - _least(groups, alive) / max(1, groups.whole(budget))


def _least(groups: DependencyGroups, alive: Mapping[str, Tensor]) -> int:
    """Return what is left of the budget if every group keeps as few channels as it may."""
    fewest = {
        group.name: _kept(
            groups, group, _ranks(group, torch.zeros(group.units), alive[group.name]), alive[group.name], group.units
        )
        for group in groups
    }
    return groups.remaining(fewest, groups.scope.budget)


def gone(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the removed fraction of the budget."""
    budget = groups.scope.budget
    return 1 - groups.remaining(kept, budget) / max(1, groups.whole(budget))


def largest_step(groups: DependencyGroups, kept: Mapping[str, Tensor]) -> float:
    """Return the largest fraction of the budget that one step of removed channels takes, over all groups.

    `gone` exceeds the requested sparsity by less than this fraction; that of experts differs from it by half of one.
    """
    budget, most = groups.scope.budget, 0
    if groups.to_nearest:
        return 1 / max(groups.sizes.values())
    for together in [groups.groups] if groups.equal_widths else [(group,) for group in groups]:
        back = {**kept, **{group.name: _before_last_step(groups, group, kept[group.name]) for group in together}}
        touched = {member.tensor for group in together for member in group.members}
        most = max(most, groups.remaining(back, budget, touched) - groups.remaining(kept, budget, touched))
    return most / max(1, groups.whole(budget))


def _before_last_step(groups: DependencyGroups, group: DependencyGroup, kept: Tensor) -> Tensor:
    """Return the kept channels of a group with those that its last step removed."""
    rows = kept.view(group.pools, -1)
    counts = rows.sum(1, keepdim=True)
    most = int(counts.max())
    back = _permitted(groups, group, min(most + 1, group.pool)) - most
    return (rows | ((~rows).cumsum(1) <= back * (counts == most))).flatten()


def _ranks(group: DependencyGroup, scores: Tensor, alive: Tensor) -> Tensor:
    """Return the place of each channel in the order of removal of its pool, (pools, channels of a pool)."""
    pairs = zip(scores.view(group.pools, -1), alive.view(group.pools, -1), strict=True)
    return torch.stack([_own_order(*own, group.keeps_first).argsort() for own in pairs])


def _own_order(scores: Tensor, alive: Tensor, keeps_first: bool = False) -> Tensor:
    """Return the channels of a group in the order of removal: dead channels first, then by ascending score."""
    order = scores.cpu().sort(stable=True).indices
    if keeps_first:
        order = len(scores) - 1 - scores.cpu().flip(0).sort(stable=True).indices
    return order[alive[order].to(torch.uint8).sort(stable=True).indices]


def _order(groups: DependencyGroups, scores: Mapping[str, Tensor], alive: Mapping[str, Tensor]) -> Tensor:
    """Return the group number of each channel of the network, in the order of removal."""
    numbers = torch.cat([torch.full((group.units,), number) for number, group in enumerate(groups)])
    if groups.scope.kind == "global":
        everything = torch.cat([scores[group.name].cpu() for group in groups])
        return numbers[_own_order(everything, torch.cat([alive[group.name] for group in groups]))]
    shares = torch.cat([torch.arange(1, group.units + 1).double() / group.units for group in groups])
    return numbers[shares.sort(stable=True).indices]


def _kept(groups: DependencyGroups, group: DependencyGroup, ranks: Tensor, alive: Tensor, gone: int) -> Tensor:
    """Return which channels are kept after removing `gone` of each pool; the kept count is rounded up."""
    count = _permitted(groups, group, max(group.pool - gone, groups.scope.min_kept, 1))
    counts = alive.view(group.pools, -1).sum(1, keepdim=True).clamp(max=count)
    return (ranks >= group.pool - counts).flatten()


def _permitted(groups: DependencyGroups, group: DependencyGroup, count: int) -> int:
    """Return the smallest number of channels, `count` or more, that a group can keep by `round_to` and its `counts`."""
    step = groups.scope.round_to // math.gcd(groups.scope.round_to, group.width)
    if not group.counts:
        return min(-(-count // step) * step, group.pool)
    return next((each for each in group.counts if each >= count and each % step == 0), group.pool)
