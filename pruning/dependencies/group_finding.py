"""Search for dependency groups: channels whose labels a traced network ties together.

DepGraph (Fang et al. 2023, arXiv 2301.12900) groups layers. This module groups positions along the dimensions of
parameters, so slices, concatenations and heads need no special rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, fx, nn

from pruning.choices.axes import Scope, Unit
from pruning.dependencies.budgets import multiplied_activations, use_of
from pruning.dependencies.dependency_groups import NO_EXAMPLE, DependencyGroup, DependencyGroups, Held, Member
from pruning.dependencies.families.stock_transformer import family_groups
from pruning.graph.label_flow import FIXED, Flow
from pruning.graph.label_rules import flow_of
from pruning.graph.tracing import Example, Traced, traced
from pruning.holding.parameter import plain_modules


def dependency_groups(
    model: nn.Module, example: Example | None = None, unit: Unit | None = None, scope: Scope | None = None
) -> DependencyGroups:
    """Find the groups of channels, units and heads that can only be removed together, with all their members.

        for group in pruning.dependency_groups(model, images[:2]):
            print(group.name, group.units, [(member.tensor, member.dims) for member in group.members])

    A group contains everything that is removed with a channel: biases, shifts and scales of norms, the inputs of the
    layers that read it, the other branch of a residual connection, depthwise convolutions. Attention heads and groups
    of a convolution are removed as wholes. No group contains channels that cannot be removed: inputs and outputs of
    the network, channels in the statistics of LayerNorm, and inputs of operations without a rule.

    Args:
        model: pruned or not; it is not changed.
        example: input of the network, as for `pruning.shrink`; layers, heads, hidden units and the residual width of a
            stock transformer need it only for the budget "macs".
        unit: kind of the groups, and how entries are combined to a channel's score (`reduce`); None: traced groups, the
            sum.
        scope: how many channels are kept, and how scores are normalised; None: each group separately.

    Raises:
        ValueError: `torch.export` cannot trace the model, or it has no channels that can be removed.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    if unit is not None and unit.of_transformer:
        return family_groups(model, unit, scope, example)
    if example is None:
        raise ValueError(NO_EXAMPLE)
    trace = traced(model, example)
    flow = flow_of(trace)
    _unite(flow)
    names = _names(trace)
    found = list(_groups(flow, names))
    if not found:
        raise ValueError(
            f"`model` ({type(model).__name__}) has no channels that can be removed: each is an input or output of the "
            "network, or an operation needs it; type unit='entry' or unit='channel'."
        )
    groups = tuple(group for group, _ in found)
    products = multiplied_activations(flow, [(group.name, number) for group, number in found])
    return DependencyGroups(groups, _tensors(flow, names), unit or Unit("group"), scope or Scope(), tuple(products))


def _unite(flow: Flow) -> None:
    """Tie labels that must be removed together, so that tensors stay regular and statistics do not change."""
    labels, why = flow.labels, "it goes with what stays"
    for site in flow.sites:
        if site.inputs is site.outputs:  # statistics
            if site.reads is None:
                labels.pin(site.inputs, site.because)
            else:
                labels.tie(site.inputs, site.inputs[site.reads.int().argmax(1)], why)
    for one, other in flow.shapes.same:
        labels.tie(one, one[:, :1], why)
        labels.tie(other, one[:, :1], why)
    before = -1
    while before != (before := len(torch.unique(labels.roots(torch.arange(len(labels)))))):
        for grid in flow.shapes.grids:
            _regular(flow, grid.squeeze())


def _regular(flow: Flow, grid: Tensor) -> None:
    """Tie labels of a grid so that its rows keep equal lengths.

    A row whose labels are all tied together is removed as a whole; other rows lose the same positions.
    """
    if grid.ndim < 2:
        return
    rows = flow.labels.roots(grid).reshape(-1, grid.shape[-1])
    whole = (rows == rows[:, :1]).all(1)
    if not whole.all():
        flow.labels.tie(rows[~whole], rows[~whole][:1], "it goes with what stays")
    _regular(flow, torch.where(whole, rows[:, 0], FIXED).reshape(grid.shape[:-1]))


def _names(trace: Traced) -> dict[int, str]:
    """Return id of a tensor -> its first name in a plain model."""
    found: dict[int, str] = {}
    for path, module in plain_modules(trace.model):
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is not None:
                found.setdefault(id(tensor), f"{path}.{leaf}" if path else leaf)
    return found


def _fields(flow: Flow, names: dict[int, str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, field with the roots of its labels) for each field of each tensor, parameters first."""
    nodes: dict[int, tuple[fx.Node, Tensor]] = {}
    for node in flow.fields:
        if node.op == "get_attr":
            tensor = flow.traced.tensor(str(node.target))
            nodes.setdefault(id(tensor), (node, tensor))
    for key, (node, tensor) in sorted(nodes.items(), key=lambda item: not isinstance(item[1][1], nn.Parameter)):
        for field in flow.of(node) if key in names else ():
            yield names[key], tensor, flow.labels.roots(field)


def _groups(flow: Flow, names: dict[int, str]) -> Iterator[tuple[DependencyGroup, Tensor]]:
    """Yield (group, channel number of each label): channels with positions in the same dimensions of the same tensors.

    The number is -1 for labels outside the group.
    """
    pinned = torch.cat([torch.tensor([FIXED]), *(labels for labels, _ in flow.labels.pins)])
    fixed = torch.zeros(len(flow.labels), dtype=torch.bool)
    fixed[flow.labels.roots(pinned)] = True
    fields = list(_fields(flow, names))
    places: dict[int, list[int]] = defaultdict(list)
    for place, (_, _, roots) in enumerate(fields):
        for root in np.unique(roots[~fixed[roots]].numpy()).tolist():
            places[root].append(place)
    alike: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for root in sorted(places):
        if any(isinstance(fields[place][1], nn.Parameter) for place in places[root]):
            alike[tuple(places[root])].append(root)
    taken: dict[str, int] = defaultdict(int)
    for where, units in sorted(alike.items(), key=lambda item: item[1][0]):
        number = torch.full((len(flow.labels),), -1)
        number[torch.tensor(units)] = torch.arange(len(units))
        members = tuple(Member(fields[place][0], number[fields[place][2]]) for place in where)
        width = min(int((member.channels >= 0).sum()) // len(units) for member in members)
        first = members[0].tensor
        taken[first] += 1
        name = first if taken[first] == 1 else f"{first}#{taken[first]}"
        yield DependencyGroup(name, len(units), width, members), number


def _tensors(flow: Flow, names: dict[int, str]) -> dict[str, Held]:
    applied: dict[int, int] = defaultdict(int)
    outputs: dict[int, int] = {}
    for node in flow.traced.graph.graph.nodes:
        use = use_of(flow, node)
        if use and use.weight.op == "get_attr":
            weight = id(flow.traced.tensor(str(use.weight.target)))
            applied[weight] += use.times
            outputs[weight] = use.dim
    held = {}
    for path, module in plain_modules(flow.traced.model):
        for leaf, tensor in [*module._parameters.items(), *module._buffers.items()]:
            name = f"{path}.{leaf}" if path else leaf
            if tensor is not None and names[id(tensor)] == name:
                trained, key = isinstance(tensor, nn.Parameter), id(tensor)
                held[name] = Held(tensor.shape, tensor.itemsize, trained, applied[key], outputs.get(key, 0))
    return held
