"""What is pruned of a network, cut into units: entries, blocks and channels of tensors, or dependency groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from pruning.choices.axes import Scope, Unit
from pruning.choices.combining import Choices
from pruning.dependencies.dependency_groups import DependencyGroup, DependencyGroups
from pruning.scores.readings.network import Weight, weights_of
from pruning.selection.selection_groups import Groups, groups_of

Cut: TypeAlias = Groups | DependencyGroups


def groups(
    model: nn.Module,
    unit: Unit | None = None,
    scope: Scope | None = None,
    parameters: Iterable[str] | None = None,
) -> Groups:
    """Cut the parameters of a network into units.

    Args:
        model: pruned or not.
        unit: what goes at once; None is single entries.
        scope: among which units is ranked; None is whole tensors.
        parameters: names of what is pruned; None takes weights of linear and convolutional layers and of attention's
            projections.

    Raises:
        ValueError: a block or a window does not divide a tensor, or it has no such channels; the tensor is named.
    """
    return cut_of(weights_of(model, None, parameters), unit, scope)


def cut_of(weights: Mapping[str, Weight], unit: Unit | None, scope: Scope | None) -> Groups:
    """Cut weights into units."""
    shapes = {name: weight.parameter.shape for name, weight in weights.items()}
    return groups_of(shapes, unit, scope, inputs_first(weights))


def inputs_first(weights: Mapping[str, Weight]) -> set[str]:
    """Return the names of those whose first dimension are inputs, and whose second are outputs."""
    return {
        name
        for name, weight in weights.items()
        if isinstance(weight.module, _ConvTransposeNd) or type(weight.module).__name__ == "Conv1D"
    }


def dependent(model: nn.Module, choices: Choices, example: Any, parameters: Iterable[str] | None) -> DependencyGroups:
    """Return the dependency groups of a network of which only outputs of the named weights go.

    Args:
        model: pruned or not.
        choices: of unit and scope.
        example: what the network is called with.
        parameters: names of weights; None is all.

    Raises:
        ValueError: there is no example, the network cannot be traced, or nothing is left that may go.
    """
    if example is None:
        raise ValueError(
            "`example` (=None) must be what the network is called with, where `unit.kind` is 'group': channels that go "
            "together are found by following it; pass a batch of two inputs or more."
        )
    from pruning.dependencies.group_finding import dependency_groups  # torch.export takes a second to import

    try:
        found = dependency_groups(model, example, choices.unit, choices.scope)
    except ValueError as error:
        raise ValueError(f"`unit.kind` (='group') follows the network, and {error}") from error
    if parameters is None:
        return found
    spared = set(weights_of(model)) - set(parameters)
    left = tuple(group for group in found if not _outputs(found, group) & spared)
    if not left:
        raise ValueError(
            f"`parameters` (of {len(found.groups)} groups) must name all weights whose outputs go together, and leave "
            "no group; name more of them."
        )
    return replace(found, groups=left)


def _outputs(groups: DependencyGroups, group: DependencyGroup) -> set[str]:
    """Return the names of the tensors of whose outputs a group is made."""
    return {member.tensor for member in group.members if member.dims == (groups.tensors[member.tensor].outputs,)}


def scored_names(cut: Cut, model: nn.Module) -> list[str]:
    """Return the names of the parameters by which units are ranked: of dependency groups, all weights in them."""
    if isinstance(cut, Groups):
        return list(cut.sizes)
    return [name for name in weights_of(model) if name in cut.parameters]
