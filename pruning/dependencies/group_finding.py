"""Search for dependency groups: channels whose labels a traced network ties together.

DepGraph (Fang et al. 2023, arXiv 2301.12900) groups layers. This module groups positions along the dimensions of
parameters, so slices, concatenations and heads need no special rules. A cost in multiply-accumulates
counts how often a network multiplies each entry of its weights and activations.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from pruning.choices.axes import Scope, Unit
from pruning.dependencies.dependency_groups import (
    NO_EXAMPLE,
    DependencyGroup,
    DependencyGroups,
    Held,
    Member,
    Multiplied,
    held_tensors,
)
from pruning.dependencies.expert_groups import widths
from pruning.dependencies.families.family_groups import family_groups
from pruning.graph.label_flow import FIXED, Flow, covering
from pruning.graph.label_rules import flow_of
from pruning.graph.operations import (
    CONVOLUTIONS,
    GROUPED_PRODUCT,
    PRODUCTS,
    RECURRENCES,
    Recurrence,
    arguments,
    described,
    in_module,
    name_of,
)
from pruning.graph.product_rules import stack_of
from pruning.graph.traced_parts import traced_in_parts
from pruning.graph.tracing import Example
from pruning.holding.parameter import plain_modules, plain_tensors
from pruning.measure.macs import Products, weight_macs
from pruning.measure.matrix_weights import considered
from pruning.mixtures.finding import Mixture, mixtures

CUTS = ("chunk", "split", "split_with_sizes")


def dependency_groups(
    model: nn.Module, example: Example | None = None, unit: Unit | None = None, scope: Scope | None = None
) -> DependencyGroups:
    """Find the groups of channels, units and heads that can only be removed together, with all their members.

        for group in pruning.dependency_groups(model, images[:2]):
            print(group.name, group.units, [(member.tensor, member.dims) for member in group.members])

    A group contains everything that is removed with a channel: biases, shifts and scales of norms, the inputs of the
    layers that read it, the other branch of a residual connection, depthwise convolutions. Attention heads and groups
    of a convolution are removed as wholes. No group contains channels that cannot be removed: inputs and outputs of
    the network, channels in the statistics of LayerNorm, and inputs of operations without a rule. In a network that
    `torch.export` cannot trace whole, groups lie within its largest modules that can be traced (`limits`).

    Args:
        model: pruned or not; it is not changed.
        example: input of the network, as for `pruning.shrink`; layers, heads, hidden units and the residual width of a
            stock transformer need it only for the budget "macs".
        unit: kind of the groups, and how entries are combined to a channel's score (`reduce`); None: traced groups, the
            sum.
        scope: how many channels are kept, and how scores are normalised; None: each group separately.

    Raises:
        ValueError: `torch.export` can trace neither the model nor a part of it, or there are no channels that can be
            removed.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    if unit is not None and unit.of_transformer:
        return family_groups(model, unit, scope, example)
    if example is None:
        raise ValueError(NO_EXAMPLE)
    trace = traced_in_parts(model, example)
    flow = flow_of(trace)
    _unite(flow)
    tensors = plain_tensors(plain_modules(trace.model))
    names = {id(tensor): name for name, tensor in reversed(tensors.items())}  # the first of a tied one's names
    found = list(_groups(flow, names))
    if not found:
        raise ValueError(
            f"`model` ({type(model).__name__}) has no channels that can be removed: each is an input or output of the "
            f"network, or an operation needs it{_needs(flow)}; type unit='entry' or unit='channel'."
            + f" ({trace.refusal})"
            * bool(trace.refusal)
        )
    experts = mixtures(model)
    stacks = {name: tensor for each in experts for name, tensor in each.stacks.items()}
    groups = tuple(_in_rows_of_experts(group, stacks) for group, _ in found)
    products = multiplied_activations(flow, [(group.name, number) for group, number in found])
    made = DependencyGroups(
        groups, _held(flow, tensors, names, experts), unit or Unit("group"), scope or Scope(), tuple(products)
    )
    if not trace.refusal:
        return made
    others = weight_macs(trace.model, example).total - made.whole("macs")
    rest = Multiplied(torch.Size(), others, ())
    return replace(made, products=(*made.products, rest), limits=_limits(flow))


def _limits(flow: Flow) -> str:
    """Return which parts of a network are traced, why, and the weights outside."""
    trace = flow.traced
    parts = ", ".join(dict.fromkeys(part.path for part in trace.parts))
    outside = considered(trace.model, (str(node.target) for node in flow.fields if node.op == "get_attr")).dense
    stay = f"; {', '.join(outside)} outside of these modules keep all channels" if outside else ""
    return f"groups are found within the modules {parts}, whose inputs and outputs stay{stay}: {trace.refusal}"


def _needs(flow: Flow) -> str:
    """Return the reasons for which outputs of weights stay, each with the first weight, as the end of a sentence."""
    found: dict[str, str] = {}
    for site in flow.sites:
        if site.weight is not None:
            roots = flow.labels.roots(site.outputs)
            pins = (why for labels, why in flow.labels.pins if torch.isin(flow.labels.roots(labels), roots).any())
            named = str(site.weight.target) if site.weight.op == "get_attr" else described(site.node)
            found.setdefault(next(pins, "it goes with what stays"), named)
    return f" ({'; '.join(f'{weight}: {why}' for why, weight in [*found.items()][:3])})" if found else ""


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
    for node in flow.fields:
        _equal_pieces(flow, node)
        _equal_widths(flow, node)
    before = -1
    while before != (before := len(torch.unique(labels.roots(torch.arange(len(labels)))))):
        for grid in flow.shapes.grids:
            _regular(flow, grid.squeeze())


def _equal_pieces(flow: Flow, node: fx.Node) -> None:
    """Tie the channels of equal pieces of a tensor, so that code that cuts a smaller tensor in equal pieces holds.

    Pieces of which a channel must stay lose their channels apart; the smaller network is then a graph.
    """
    if name_of(node) not in CUTS or not flow.fields[node]:
        return
    dim = int(arguments(node)["dim"]) % flow.constants.values[node][0].ndim
    pieces = [piece for own in flow.fields[node] if (piece := covering(own, dim)) is not None]
    free = bool(pieces) and not _has_to_stay(flow, torch.cat([piece.flatten() for piece in pieces]))
    if free and len(pieces) == len(flow.fields[node]) and len({piece.shape for piece in pieces}) == 1:
        for piece in pieces[1:]:
            flow.labels.tie(pieces[0], piece, "equal pieces keep equally many")


def _equal_widths(flow: Flow, node: fx.Node) -> None:
    """Tie channels that a view merges, such as those of all heads, to equally many of its module's input.

    The forward may have read their number from the input, as in `batch, width, *_ = x.shape`.
    """
    if name_of(node) not in ("view", "reshape", "_unsafe_view") or not (path := in_module(node)):
        return
    before, after = (flow.value(each).shape for each in (node.all_input_nodes[0], node))
    ends = [before[:dim].numel() for dim in range(len(before) + 1)]
    for dim, size in enumerate(after):
        start = after[:dim].numel()
        if size in before or start not in ends or start * size not in ends:
            continue  # no dimensions are merged
        merged = covering(flow.of(node), dim)
        for field in _fields_of_inputs(flow, node.graph, path):
            if field.numel() != size or max(field.shape) != size or _has_to_stay(flow, field):
                continue
            why = f"`{path}` may take its number for a view"
            if merged is None or merged.numel() != size:
                flow.labels.pin(field.flatten(), why)
            else:
                flow.labels.tie(field.flatten(), merged.flatten(), why)


def _fields_of_inputs(flow: Flow, graph: fx.Graph, path: str) -> Iterator[Tensor]:
    """Yield the fields of the tensors that a module reads, other than parameters."""
    inner = {each for each in graph.nodes if f"{in_module(each)}.".startswith(f"{path}.")}
    read = dict.fromkeys(each for own in graph.nodes if own in inner for each in own.all_input_nodes)
    yield from (
        field for each in read if each.op != "get_attr" and _whole(each) not in inner for field in flow.of(each)
    )


def _whole(node: fx.Node) -> fx.Node:
    """Return the tensor that a node is a piece of; a trace may place the cut in the module that reads the piece."""
    while name_of(node) in CUTS or node.target is operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _has_to_stay(flow: Flow, labels: Tensor) -> bool:
    pinned = torch.cat([torch.tensor([FIXED]), *(each for each, _ in flow.labels.pins)])
    return bool(torch.isin(flow.labels.roots(labels), flow.labels.roots(pinned)).any())


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


def _fields(flow: Flow, names: Mapping[int, str]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield (name, tensor, field with the roots of its labels) for each field of each tensor, parameters first."""
    nodes: dict[int, tuple[fx.Node, Tensor]] = {}
    for node in flow.fields:
        if node.op == "get_attr":
            tensor = flow.traced.tensor(str(node.target))
            nodes.setdefault(id(tensor), (node, tensor))
    for key, (node, tensor) in sorted(nodes.items(), key=lambda item: not isinstance(item[1][1], nn.Parameter)):
        for field in flow.of(node) if key in names else ():
            yield names[key], tensor, flow.labels.roots(field)


def _groups(flow: Flow, names: Mapping[int, str]) -> Iterator[tuple[DependencyGroup, Tensor]]:
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


def _in_rows_of_experts(group: DependencyGroup, stacks: Mapping[str, Tensor]) -> DependencyGroup:
    """Limit a group in the rows of stacked experts to the widths that stock grouped products take."""
    for member in group.members:
        if (stack := stacks.get(member.tensor)) is not None and stack.ndim - 1 in member.dims:
            return replace(group, counts=widths(stack, group.units))
    return group


def _held(
    flow: Flow, tensors: Mapping[str, Tensor], names: Mapping[int, str], found: Sequence[Mixture]
) -> dict[str, Held]:
    stacks = {name for each in found for name in each.stacks}
    applied: dict[str, int] = defaultdict(int)
    outputs: dict[str, int] = {}
    for node in flow.traced.graph.graph.nodes:
        calls = len(flow.traced.parts[node.meta.get("part", 0)].calls)
        own = use_of(flow, node)
        for use in [own] if own else _uses_of_recurrence(flow, node):
            weight = flow.traced.tensor(str(use.weight.target)) if use.weight.op == "get_attr" else None
            if id(weight) in names:
                matrices = flow.value(use.weight).shape[0] if names[id(weight)] in stacks else 1
                applied[names[id(weight)]] += int(use.times * matrices) * calls
                outputs[names[id(weight)]] = use.dim
    return held_tensors(tensors, applied, outputs, found)


WHOLE = ("addbmm", "mv", "addmv", "dot")
"""Products without a label rule: all of their inputs are kept."""


class Use(NamedTuple):
    """Use of a weight by a layer: how often each entry is multiplied, and the dimension of the outputs."""

    weight: fx.Node
    times: int | Fraction
    dim: int


def use_of(flow: Flow, node: fx.Node) -> Use | None:
    """Return how a node uses its weight; None if the node is not the operation of a layer."""
    name = name_of(node)
    if name not in ("linear", "addmm", GROUPED_PRODUCT, *PRODUCTS, *CONVOLUTIONS):
        return None
    given = arguments(node)
    by_inputs = name in ("addmm", GROUPED_PRODUCT, *PRODUCTS)  # weight of shape (..., inputs, outputs)
    both = list(given.values())[int(name == "addmm") :][:2]
    source, weight = both if by_inputs else (given["input"], given["weight"])
    shape, result = flow.value(weight).shape, flow.value(node)
    if name in PRODUCTS and (stack := stack_of(flow, node)):
        values, first = flow.value(stack), stack is source
        outputs = values.numel() // max(1, values.shape[-1 if first else -2])
        return Use(stack, result.numel() // max(1, outputs), values.ndim - 1 - first)
    if name in PRODUCTS and (weight.op != "get_attr" or len(shape) != 2):
        return None
    if name == GROUPED_PRODUCT:  # each row is multiplied with one matrix of the stack
        return Use(weight, Fraction(len(result), shape[0]), 2)
    if "transpose" in name or bool(given.get("transposed")):
        return Use(weight, flow.value(source).numel() // max(1, shape[0]), 1)
    return Use(weight, result.numel() // max(1, shape[int(by_inputs)]), int(by_inputs))


def _uses_of_recurrence(flow: Flow, node: fx.Node) -> Iterator[Use]:
    """Yield the uses of an RNN's weights."""
    if name_of(node) in RECURRENCES and "input" in (given := arguments(node)):
        times = flow.value(given["input"])[..., 0].numel()
        for layer in Recurrence.all_of(given):
            weights = (layer.inputs, layer.states, layer.projection)
            yield from (Use(weight, times, 0) for weight in weights if weight is not None)


def multiplied_activations(flow: Flow, numbers: Iterable[tuple[str, Tensor]]) -> Iterator[Multiplied]:
    """Yield the factors of products that are not parameters: queries, attention weights, computed weights.

    Args:
        numbers: pairs (name of a group, channel number of each label); -1 for labels outside the group.
    """
    numbers = list(numbers)
    for node in flow.traced.graph.graph.nodes:
        calls = len(flow.traced.parts[node.meta.get("part", 0)].calls)
        if name_of(node) in WHOLE:
            yield Multiplied(torch.Size(), _macs(flow, node) * calls, ())
        for factor, times in _factors(flow, node):
            fields = [flow.labels.roots(field) for field in flow.of(factor)]
            members = [(name, Member(factor.name, number[field])) for name, number in numbers for field in fields]
            own = tuple((name, member) for name, member in members if bool((member.channels >= 0).any()))
            yield Multiplied(flow.value(factor).shape, times * calls, own)


def _factors(flow: Flow, node: fx.Node) -> Iterator[tuple[fx.Node, int | Fraction]]:
    """Yield (factor, multiplications per entry of the factor) that together count a node's multiplications."""
    use, name = use_of(flow, node), name_of(node)
    if use and use.weight.op != "get_attr":
        yield use.weight, use.times
    elif name == "scaled_dot_product_attention":
        query, key, *_ = arguments(node).values()
        yield query, flow.value(key).shape[-2]
        yield node, flow.value(key).shape[-2]
    elif name in PRODUCTS and use is None:
        one, result = next(iter(arguments(node).values())), flow.value(node)
        shape = flow.value(one).shape
        if covering(flow.of(one), len(shape) - 1) is None:
            yield node, shape[-1]
        else:  # only the kept entries of this factor are multiplied; the other factor keeps all of its outputs
            yield one, result.numel() * shape[-1] // max(1, shape.numel())


def _macs(flow: Flow, node: fx.Node) -> int:
    """Count the multiply-accumulates of an operation by running it on the meta device."""
    found: list[int] = []
    args, kwargs = tree_map(
        lambda each: flow.value(each).to("meta") if isinstance(each, fx.Node) else each, (node.args, dict(node.kwargs))
    )
    with Products(lambda product: found.append(product.macs)):
        node.target(*args, **kwargs)  # type: ignore[operator]
    return sum(found)
