"""Units of a network that are pruned: entries, blocks, channels or groups, with the BatchNorms that follow layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from pruning.choices.axes import Scope, Unit
from pruning.choices.combining import Choices
from pruning.dependencies.dependency_groups import NO_EXAMPLE, DependencyGroup, DependencyGroups
from pruning.dependencies.families.stock_transformer import family_groups
from pruning.errors import RefusedValue
from pruning.scores.readings.network import Weight, network, weights_of
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
    if choices.unit.of_transformer:
        return _with_outputs_of(family_groups(model, choices.unit, choices.scope, example, spared), spared)
    if example is None:
        raise ValueError(NO_EXAMPLE)
    from pruning.dependencies.group_finding import dependency_groups  # torch.export takes a second to import

    try:
        found = dependency_groups(model, example, choices.unit, choices.scope)
    except ValueError as error:
        raise RefusedValue("unit.kind", "group").because(f"needs to trace the network: {error}") from error
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


_KEEPING_CHANNELS = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "softplus", "hardswish", "hardtanh"),
        *("tanh", "sigmoid", "hardsigmoid", "dropout", "contiguous", "clone"),
        *(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)),
    }
)
"""Functions and methods that keep every channel at its position."""


def batch_norms_after(model: nn.Module) -> dict[str, str]:
    """Return name of a layer's weight -> name of the scale of the BatchNorm that reads the layer's output.

    Activations, dropout and pooling may come between the two. A layer is left out if no BatchNorm follows it, if it or
    its BatchNorm is called more than once, or if its channels are mixed with others before the BatchNorm.

    Raises:
        ValueError: `torch.fx` cannot trace the forward of `model`.
    """
    with network(model, None, None) as net:
        modules = dict(net.model.named_modules())
        try:
            graph = _Layers().trace(net.model)
        except Exception as error:
            raise ValueError(
                f"`model` ({type(model).__name__}) cannot be traced by torch.fx ({str(error).splitlines()[0]}), which "
                "finds the BatchNorm after each layer; remove branches on inputs from its forward, or choose a score "
                "that does not read BatchNorm."
            ) from error
    calls = Counter(id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module")
    found: dict[str, str] = {}
    for node in graph.nodes:
        norm = modules[str(node.target)] if node.op == "call_module" else None
        source = _source(node.all_input_nodes, modules) if isinstance(norm, _BatchNorm) and norm.affine else None
        if norm is None or source is None or any(calls[id(each)] > 1 for each in (norm, modules[source])):
            continue
        layer: Any = modules[source]
        if (layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features) != norm.num_features:
            continue
        found.setdefault(_weight(source), _weight(str(node.target)))
    return {name: found[name] for name in map(_weight, modules) if name in found}


class _Layers(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear | _ConvNd | _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _source(read: list[fx.Node], modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the one layer whose channels these nodes carry; None if there is none, or several."""
    while len(read) == 1:
        node = read[0]
        module: Any = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, nn.Linear | _ConvNd):
            return str(node.target)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        kind = "" if module is None else type(module).__module__
        keeps = isinstance(module, nn.Identity) or kind.endswith((".activation", ".dropout", ".pooling"))
        if not keeps and (module is not None or name.rstrip("_") not in _KEEPING_CHANNELS):
            return None
        read = node.all_input_nodes
    return None


def _weight(path: str) -> str:
    return f"{path}.weight" if path else "weight"
