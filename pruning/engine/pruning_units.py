"""Units of a network that are pruned: entries, blocks and channels of tensors, or channels of dependency groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import nn
from torch.nn.modules.conv import _ConvTransposeNd

from pruning.choices.axes import TRANSFORMER_UNITS, Scope, Unit
from pruning.choices.combining import Choices
from pruning.dependencies.dependency_groups import NO_EXAMPLE, DependencyGroup, DependencyGroups
from pruning.dependencies.families.family_groups import family_groups
from pruning.scores.readings.network import Weight, weights_of
from pruning.selection.selection_groups import Groups, groups_of

Cut: TypeAlias = Groups | DependencyGroups


def groups(
    model: nn.Module,
    unit: Unit | None = None,
    scope: Scope | None = None,
    parameters: Iterable[str] | None = None,
) -> Groups:
    """Divide the parameters of a network into units.

    Args:
        model: pruned or not.
        unit: entries that are pruned together; None: single entries.
        scope: units that are ranked together; None: those of one tensor.
        parameters: names of the parameters to prune; None: weights of linear and convolutional layers and of
            attention's projections.

    Raises:
        ValueError: a block or a window does not divide a tensor, or a tensor has no channels along the dimension; the
            message names the tensor.
    """
    return cut_of(weights_of(model, None, parameters), unit, scope)


def cut_of(weights: Mapping[str, Weight], unit: Unit | None, scope: Scope | None) -> Groups:
    """Divide weights into units."""
    shapes = {name: weight.parameter.shape for name, weight in weights.items()}
    return groups_of(shapes, unit, scope, inputs_first(weights))


def inputs_first(weights: Mapping[str, Weight]) -> set[str]:
    """Return the names of weights whose first dimension is the inputs and whose second is the outputs."""
    return {
        name
        for name, weight in weights.items()
        if isinstance(weight.module, _ConvTransposeNd) or type(weight.module).__name__ == "Conv1D"
    }


def groups_of_weights(
    model: nn.Module, choices: Choices, example: Any, parameters: Iterable[str] | None
) -> DependencyGroups:
    """Return the dependency groups of a network that remove only outputs of the named weights.

    Units of stock transformers come from their family; others are found by tracing.

    Args:
        model: pruned or not.
        choices: unit and scope are read.
        example: input of the network.
        parameters: names of weights; None: all.

    Raises:
        ValueError: there is no example, the network cannot be traced or is of no family, or no group is left.
    """
    spared = set() if parameters is None else set(weights_of(model)) - set(parameters)
    if choices.unit.kind in TRANSFORMER_UNITS:
        return _with_outputs_of(family_groups(model, choices.unit, choices.scope, example, spared), spared)
    if example is None:
        raise ValueError(NO_EXAMPLE)
    from pruning.dependencies.group_finding import dependency_groups  # torch.export takes a second to import

    try:
        found = dependency_groups(model, example, choices.unit, choices.scope)
    except ValueError as error:
        raise ValueError(f"`unit.kind` (='group') needs to trace the network: {error}") from error
    return _with_outputs_of(found, spared)


def _with_outputs_of(found: DependencyGroups, spared: set[str]) -> DependencyGroups:
    """Return the groups that remove no outputs of the weights `spared`."""
    left = tuple(group for group in found if not _outputs(found, group) & spared)
    if not any(group.units for group in left):
        raise ValueError(
            "`parameters` must name all weights of at least one of the network's "
            f"{len(found.groups)} dependency groups, whose outputs are removed together; name more weights."
        )
    return replace(found, groups=left)


def _outputs(groups: DependencyGroups, group: DependencyGroup) -> set[str]:
    """Return the names of the tensors whose outputs belong to a group."""
    return {member.tensor for member in group.members if member.dims == (groups.tensors[member.tensor].outputs,)}


def scored_names(cut: Cut, model: nn.Module) -> list[str]:
    """Return the names of the parameters to score; for dependency groups, all weights in the groups."""
    if isinstance(cut, Groups):
        return list(cut.sizes)
    return [name for name in weights_of(model) if name in cut.parameters]
