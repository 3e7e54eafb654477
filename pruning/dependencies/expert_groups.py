"""Dependency groups of experts, and of the hidden units within them.

With an expert go its matrices, its biases, its rows of the router and the corrections of its scores.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Iterator

import torch
from torch import Tensor, nn

from pruning.dependencies.dependency_groups import DependencyGroup, Member
from pruning.holding.parameter import plain_modules
from pruning.layouts import required_layout
from pruning.mixtures.finding import Mixture, expert_dim, mixtures


def expert_groups(model: nn.Module, spared: Collection[str] = ()) -> Iterator[DependencyGroup]:
    """Yield a group of experts for each mixture, or for each group of experts that a router chooses among first.

    Args:
        model: pruned or not; it is not changed.
        spared: names of weights that must stay whole.

    Raises:
        ValueError: the network has no mixture whose experts are stacked, the router of one has another form, mixtures
            have unequal numbers of experts, or experts of some mixtures only are spared.
    """
    found = mixtures(model)
    if not found:
        raise ValueError(
            f"`unit.kind` (='expert') is for mixtures whose experts are stacked in parameters, and `model` is a "
            f"{type(model).__name__} without one; experts in a list are layers like others: type unit='entry'."
        )
    modules = dict(plain_modules(model))
    for mixture in found:
        if not _is_known(mixture, modules[mixture.experts]):
            raise ValueError(
                f"`unit.kind` (='expert') cannot be pruned in {mixture.path!r}, whose router has another form: it "
                "must have a row of a weight for each expert, choose by their products and by no table, and call "
                "experts with inputs, the experts of each token and their weights; type unit='entry', which prunes "
                "within experts."
            )
        if (mixture.count, mixture.groups) != (found[0].count, found[0].groups):
            raise ValueError(
                f"`unit.kind` (='expert') removes equally many experts in each layer, and {mixture.path!r} has "
                f"{mixture.count} experts where {found[0].path!r} has {found[0].count}; type unit='entry'."
            )
        if left := [name for name in mixture.stacks if name in spared]:
            raise ValueError(
                f"`parameters` (without {left[0]!r}) must name the experts of all layers for unit='expert', which "
                "removes equally many in each; name all of them, or none."
            )
    for mixture in found:
        yield from _groups(mixture)


def _is_known(mixture: Mixture, experts: nn.Module) -> bool:
    taken = inspect.signature(experts.forward).parameters.values()
    tensors = len(taken) > 2 or any(each.kind is each.VAR_POSITIONAL for each in taken)
    return bool(mixture.router and mixture.stacks) and tensors and mixture.top_k is not None


def _groups(mixture: Mixture) -> Iterator[DependencyGroup]:
    units = mixture.count // mixture.groups
    names = [*mixture.stacks, *mixture.router]
    for number in range(mixture.groups):
        channels = torch.arange(mixture.count) - number * units
        channels[(channels < 0) | (channels >= units)] = -1
        members = []
        for name, tensor in {**mixture.stacks, **mixture.router}.items():
            dim = expert_dim(tensor, mixture.count)
            members.append(Member(name, channels.reshape([-1 if each == dim else 1 for each in range(tensor.ndim)])))
        name = names[0] + (f"#{number + 1}" if number else "")
        counts = tuple(range(min(mixture.least, units), units + 1))
        yield DependencyGroup(name, units, 1, tuple(members), counts, keeps_first=True)


ALIGNMENT = 16
"""Bytes of which each row of a stack must hold a multiple: stock grouped products take no others."""


def widths(tensor: Tensor, width: int) -> tuple[int, ...]:
    """Return the numbers of hidden units that each expert can keep, ascending."""
    step = math.gcd(ALIGNMENT // math.gcd(ALIGNMENT, tensor.itemsize), width)
    return tuple(range(step, width + 1, step))


def hidden_units(mixture: Mixture, experts: nn.Module) -> DependencyGroup:
    """Return the group of the hidden units of all experts of a mixture, with a pool for each expert.

    The last stack reads hidden units. The others write them, gates and values in halves or by turns.

    Raises:
        ValueError: the inputs and outputs of a stack are not known.
    """
    *writers, reader = [name for name, tensor in mixture.stacks.items() if tensor.ndim > 2]
    dim = required_layout(experts, reader.rpartition(".")[2]).inputs
    width = mixture.stacks[reader].shape[dim]
    dims = {reader: dim} | {name: required_layout(experts, name.rpartition(".")[2]).outputs for name in writers}
    dims |= {bias: 1 for name in writers if (bias := f"{name}_bias") in mixture.stacks}
    members = []
    for name, dim in dims.items():
        tensor = mixture.stacks[name]
        units, times = torch.arange(width), tensor.shape[dim] // width
        units = units.repeat(times) if getattr(experts, "is_concatenated", True) else units.repeat_interleave(times)
        channels = width * torch.arange(mixture.count)[:, None] + units
        shape = [size if each in (0, dim) else 1 for each, size in enumerate(tensor.shape)]
        members.append(Member(name, channels.reshape(shape)))
    counts = widths(mixture.stacks[reader], width)
    return DependencyGroup(reader, mixture.count * width, 1, tuple(members), counts, pools=mixture.count)
