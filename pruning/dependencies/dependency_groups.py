"""Dependency groups as plain data: channels of several tensors that are removed together, their scores and costs.

A group has a number of channels, and members: the tensors that hold them. For example, the members of a convolution's
group are its outputs, its bias, the scale and shift of its BatchNorm, and the inputs of the next layer. A channel is
removed from all members or from none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from pruning.choices.axes import EQUAL_WIDTHS, Budget, Scope, Unit

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
        counts: numbers of channels that can be kept, ascending, the last is `units`; empty: any number.
    """

    name: str
    units: int
    width: int
    members: tuple[Member, ...]
    counts: tuple[int, ...] = ()

    @property
    def pool(self) -> int:
        """Number of channels that are ranked together: all of them."""
        return self.units


@dataclass(frozen=True)
class Held:
    """Tensor of the network: its shape, the costs of its entries, and the dimension of its outputs."""

    shape: torch.Size
    itemsize: int
    trained: bool
    applied: int = 0
    outputs: int = 0

    def cost(self, budget: Budget) -> int:
        """Return the cost of one entry: 1 if it is a parameter, its bytes, or its number of multiplications."""
        return {"parameters": int(self.trained), "bytes": self.itemsize, "macs": self.applied}.get(budget, 0)


@dataclass(frozen=True)
class Multiplied:
    """Activations that are multiplied: their shape, multiplications per entry, and positions of channels."""

    shape: torch.Size
    applied: int
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
    """

    groups: tuple[DependencyGroup, ...]
    tensors: Mapping[str, Held]
    unit: Unit
    scope: Scope
    products: tuple[Multiplied, ...] = ()
    others: tuple[DependencyGroup, ...] = ()
    others_kept: Mapping[str, Tensor] = field(default_factory=dict)

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
                kept = True if mask is None else _any((mask != 0).cpu(), member.channels)
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
            budget: "channels" of these groups; "parameters" or "bytes" (with buffers) of the whole network; "macs":
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
        left = sum(
            cost * self.entries(name, kept)
            for name in (self.tensors if tensors is None else tensors)
            if (cost := self.tensors[name].cost(budget))
        )
        if budget == "macs":
            left += sum(each.applied * _entries(each.shape, each.members, kept) for each in self.products)
        return left

    def entries(self, name: str, kept: Mapping[str, Tensor]) -> int:
        """Return how many entries of a tensor remain after removing the channels that `kept` does not keep."""
        return _entries(self.tensors[name].shape, self._by_tensor.get(name, ()), kept)

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


def _any(mask: Tensor, channels: Tensor) -> Tensor:
    for dim, size in enumerate(channels.shape):
        if size == 1:
            mask = mask.any(dim, keepdim=True)
    return mask
