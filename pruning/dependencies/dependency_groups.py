"""Dependency groups as plain data: which channels of which tensors go together, what they score, and what they cost.

A group is a number of channels and the members that have them, as the outputs of a convolution, its bias, the shift and
scale of a BatchNorm and the inputs of what reads it. A channel goes from all members or from none.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pruning.choices.axes import Budget, Scope, Unit


@dataclass(frozen=True)
class Member:
    """Where the channels of a group lie in one tensor.

    Args:
        tensor: name of the parameter or buffer in a plain model.
        channels: int64, the channel at each position and -1 where there is none of the group's; as many dimensions as
            the tensor, of size 1 along those where it is the same.
    """

    tensor: str
    channels: Tensor

    @property
    def dims(self) -> tuple[int, ...]:
        """The dimensions of the tensor along which the channels lie."""
        return tuple(dim for dim, size in enumerate(self.channels.shape) if size > 1)

    def indices(self, channel: int) -> list[int]:
        """Return the positions of a channel along the dimension of the tensor; for members that have one."""
        (_,) = self.dims
        return (self.channels.flatten() == channel).nonzero().flatten().tolist()


@dataclass(frozen=True)
class DependencyGroup:
    """Channels that are alike: each has positions in the same dimensions of the same tensors.

    Args:
        name: of the first tensor, with a number where another group of channels has the same.
        units: how many channels, or heads or groups of a convolution where these go as wholes.
        width: the fewest positions that one of them has in a member, as a head's size.
        members: all tensors that have them.
    """

    name: str
    units: int
    width: int
    members: tuple[Member, ...]

    @property
    def pool(self) -> int:
        """How many are ranked together: all."""
        return self.units


@dataclass(frozen=True)
class Held:
    """A tensor of the network: what its entries cost, and which dimension its outputs lie along."""

    shape: torch.Size
    itemsize: int
    trained: bool
    applied: int = 0
    outputs: int = 0

    def cost(self, budget: Budget) -> int:
        """Return what one entry costs: 1 of the parameters, its bytes, or the multiplications it takes part in."""
        return {"parameters": int(self.trained), "bytes": self.itemsize, "macs": self.applied}.get(budget, 0)


@dataclass(frozen=True)
class Multiplied:
    """Activations that a product multiplies: their shape, how often each entry, and where channels of groups lie."""

    shape: torch.Size
    applied: int
    members: tuple[tuple[str, Member], ...]


@dataclass(frozen=True)
class DependencyGroups:
    """The dependency groups of a network, in its order; made by `dependency_groups`.

    Args:
        groups: of channels that may go.
        tensors: name -> every parameter and buffer of the network.
        unit, scope: how channels are scored, and how many are kept.
        products: of activations, which have no tensor among those.
    """

    groups: tuple[DependencyGroup, ...]
    tensors: Mapping[str, Held]
    unit: Unit
    scope: Scope
    products: tuple[Multiplied, ...] = ()

    def __iter__(self) -> Iterator[DependencyGroup]:
        return iter(self.groups)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Name of a group -> number of its channels."""
        return {group.name: group.units for group in self.groups}

    @cached_property
    def parameters(self) -> tuple[str, ...]:
        """Names of the parameters that are members of a group, in the order of the network."""
        members = {member.tensor for group in self.groups for member in group.members}
        return tuple(name for name, held in self.tensors.items() if held.trained and name in members)

    def reduce(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name of a group -> score of each channel, float64: over all entries of all members that have scores.

        An entry counts in every member that it is in: of a residual's weight, as an output and as an input.
        `unit.reduce` says how entries make a score. `scope.normalise` divides it by the number of entries ("size"), or
        by the mean of the group ("group"): DepGraph's relative score, by which groups of any size compare.

        Args:
            scores: name of a parameter -> scores of its shape, or of its outputs alone, shape (outputs,).

        Raises:
            ValueError: no member of a group has scores, or they have another shape.
        """
        return {group.name: self._reduced(group, scores) for group in self.groups}

    def _reduced(self, group: DependencyGroup, scores: Mapping[str, Tensor]) -> Tensor:
        total, entries = torch.zeros(group.units, dtype=torch.float64), torch.zeros(group.units, dtype=torch.float64)
        for member in group.members:
            given = self._given(member, scores)
            if given is None:
                continue
            values = {"l1": torch.abs, "l2": torch.square}.get(self.unit.reduce, torch.clone)(given)
            added, here = _summed(values, member.channels), member.channels.flatten() >= 0
            total.index_add_(0, member.channels.flatten()[here], added.flatten()[here])
            each = torch.full_like(added, given.numel() / added.numel())
            entries.index_add_(0, member.channels.flatten()[here], each.flatten()[here])
        if not entries.any():
            raise ValueError(
                f"`scores` lack every parameter of the group {group.name!r}; score one of "
                f"{', '.join(dict.fromkeys(member.tensor for member in group.members))}."
            )
        if self.scope.normalise == "size":
            total /= entries
        reduced = {"l2": torch.sqrt, "square_of_sum": torch.square}.get(self.unit.reduce, torch.clone)(total)
        if self.scope.normalise == "group" and (mean := float(reduced.mean())):
            reduced = reduced / abs(mean)
        return reduced

    def _given(self, member: Member, scores: Mapping[str, Tensor]) -> Tensor | None:
        """Return the scores of a member's entries, float64 on the CPU; None where it has none."""
        given = scores.get(member.tensor)
        if given is None:
            return None
        held = self.tensors[member.tensor]
        given = given.detach().to("cpu", torch.float64)
        if given.shape == held.shape:
            return given
        if given.shape != (held.shape[held.outputs],):
            raise ValueError(
                f"`scores[{member.tensor!r}]` of shape {tuple(given.shape)} must have the parameter's shape "
                f"{tuple(held.shape)}, or that of its outputs, ({held.shape[held.outputs]},)."
            )
        return given.reshape(member.channels.shape) if member.dims == (held.outputs,) else None

    def alive(self, masks: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return name of a group -> bool for each channel, whether any entry is unpruned; all are without `masks`."""
        found = {}
        for group in self.groups:
            alive = torch.zeros(group.units, dtype=torch.bool)
            for member in group.members:
                mask = (masks or {}).get(member.tensor)
                kept = True if mask is None else _any((mask != 0).cpu(), member.channels)
                if self.tensors[member.tensor].trained:
                    alive[member.channels[(member.channels >= 0) & kept]] = True
            found[group.name] = alive
        return found

    def expand(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name of a parameter -> bool of its shape: entries whose channels `kept`, shape (units,), keeps."""
        masks = {name: torch.ones(self.tensors[name].shape, dtype=torch.bool) for name in self.parameters}
        for group in self.groups:
            for member in group.members:
                if member.tensor in masks:
                    masks[member.tensor] &= _keeps(member, kept[group.name])
        return masks

    def remaining(self, kept: Mapping[str, Tensor], budget: Budget, tensors: Collection[str] | None = None) -> int:
        """Return what is left once the channels that `kept` does not keep are taken out: exact.

        Args:
            kept: name of a group -> bool for each channel.
            budget: "channels" of these groups; "parameters" and "bytes" (with buffers) of the whole network; "macs":
                its multiply-accumulates for the example, as `pruning.measure` counts them, those of attention too.
            tensors: names of those that alone are counted, beside products of activations, but for channels; None is
                all.
        """
        if budget == "channels":
            return sum(int(each.sum()) for each in kept.values())
        left = sum(
            cost * self.entries(name, kept)
            for name in (self.tensors if tensors is None else tensors)
            if (cost := self.tensors[name].cost(budget))
        )
        if budget == "macs":
            left += sum(each.applied * _entries(each.shape, each.members, kept) for each in self.products)
        return left

    def entries(self, name: str, kept: Mapping[str, Tensor]) -> int:
        """Return how many entries of a tensor are left once the channels that `kept` does not keep are taken out."""
        return _entries(self.tensors[name].shape, self._by_tensor.get(name, ()), kept)

    @cached_property
    def _by_tensor(self) -> Mapping[str, Sequence[tuple[str, Member]]]:
        found = defaultdict(list)
        for group in self.groups:
            for member in group.members:
                found[member.tensor].append((group.name, member))
        return found


def _entries(shape: torch.Size, members: Sequence[tuple[str, Member]], kept: Mapping[str, Tensor]) -> int:
    """Return how many entries of a tensor with these members of groups are left."""
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
    """Return where a member's positions are kept; those of no channel are."""
    return torch.cat([kept, torch.ones(1, dtype=torch.bool)])[member.channels]


def _summed(values: Tensor, channels: Tensor) -> Tensor:
    """Return the sums over the dimensions along which channels do not lie."""
    dims = [dim for dim, size in enumerate(channels.shape) if size == 1]
    return values.sum(dims, keepdim=True) if dims else values


def _any(mask: Tensor, channels: Tensor) -> Tensor:
    for dim, size in enumerate(channels.shape):
        if size == 1:
            mask = mask.any(dim, keepdim=True)
    return mask
