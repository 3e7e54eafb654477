"""Dependency groups of stock transformers, made from their family instead of by tracing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn

from pruning.choices.axes import FAMILY_UNITS, TWO_UNITS, FamilyUnit, Scope, Unit
from pruning.dependencies.dependency_groups import DependencyGroup, DependencyGroups, Held, Member, Multiplied
from pruning.dependencies.families.stock_transformer import (
    Place,
    StockTransformer,
    expresses,
    joined,
    require_unit,
)
from pruning.masks.mask_set import MaskSet
from pruning.measure.layers import rule_of
from pruning.measure.macs import counted


def family_groups(
    model: nn.Module, unit: Unit, scope: Scope | None = None, example: Any = None, spared: Collection[str] = ()
) -> DependencyGroups:
    """Return the dependency groups of a stock transformer for units of its family; those of other units as `others`.

    Layers are the channels of one group, and so are the channels of the residual stream. Heads and hidden units are the
    channels of one group for each layer.

    Args:
        model: pruned or not; it is not changed.
        unit: "layer", "heads", "mlp" or "residual"; not both of "layer_and_mlp", which a plan prunes in turns.
        scope: how many are kept; `budget="macs"` needs an example.
        example: input of the network; a mapping or a tuple is unpacked.
        spared: names of weights; a layer with one of them is kept.

    Raises:
        ValueError: the configuration of the network cannot express fewer of these units, there is no example for
            multiply-accumulates, or the unit is two.
    """
    if unit.kind in TWO_UNITS:
        raise ValueError(
            f"`unit.kind` (={unit.kind!r}) has no dependency groups of its own; ask for those of "
            f"{' or '.join(map(repr, TWO_UNITS[unit.kind]))}."
        )
    kind, scope = cast(FamilyUnit, unit.kind), scope or Scope()
    found = require_unit(model, kind)
    if scope.budget == "macs" and example is None:
        raise ValueError(
            "`example` (=None) must be an input of the network if `scope.budget` is 'macs': multiply-accumulates are "
            "counted on it; pass a batch of inputs."
        )
    names = first_names(found.tensors)
    groups = [replace(each, members=_by_first_name(each, names)) for each in unit_groups(found, kind, spared)]
    others = [
        replace(each, members=_by_first_name(each, names))
        for other in FAMILY_UNITS
        if other != kind and expresses(found, other)
        for each in unit_groups(found, other)
    ]
    uses, products = _costs(model, example, found, [*groups, *others]) if scope.budget == "macs" else ({}, ())
    return DependencyGroups(tuple(groups), _tensors(found, uses), unit, scope, products, tuple(others))


def unit_groups(found: StockTransformer, kind: FamilyUnit, spared: Collection[str] = ()) -> Iterator[DependencyGroup]:
    """Yield the groups of a stock transformer for a unit, under any of the names of a tied tensor."""
    tensors = found.tensors
    if kind == "layer":
        yield _layers(found, tensors, spared)
    elif kind == "residual":
        places = list(found.stream())
        width = found.size(found.family.keys.residual)
        counts = range(found.heads, width + 1, found.heads) if found.family.heads_divide_width else ()
        yield _group(places, {place: torch.arange(width) for place in places}, tensors, tuple(counts))
    else:
        for layer in found.layers:
            yield _heads(found, layer, tensors) if kind == "heads" else _hidden_units(found, layer, tensors)


def _layers(found: StockTransformer, tensors: Mapping[str, Tensor], spared: Collection[str]) -> DependencyGroup:
    inside = {layer: [name for name in tensors if name.startswith(f"{layer}.")] for layer in found.layers}
    free = [names for names in inside.values() if not {*names} & {*spared}]
    norms = tuple(f".{norm}." for norm in found.family.norms) if found.family.norms_after else ()
    members = tuple(
        Member(name, torch.full((1,) * tensors[name].ndim, number), not any(norm in name for norm in norms))
        for number, names in enumerate(free)
        for name in names
    )
    return DependencyGroup(joined(found.base, found.family.layers), len(free), 1, members)


def _heads(found: StockTransformer, layer: str, tensors: Mapping[str, Tensor]) -> DependencyGroup:
    family, groups = found.family, found.head_groups
    of_queries = [*found.outputs_of(joined(layer, family.queries))]
    of_queries += found.inputs_of(joined(layer, family.attention_output))
    of_keys = [place for path in family.keys_and_values for place in found.outputs_of(joined(layer, path))]
    numbers = {
        place: torch.arange(groups).repeat_interleave(tensors[place.tensor].shape[place.dim] // groups)
        for place in (*of_queries, *of_keys)
    }
    width, shared = found.size(family.keys.residual), found.heads // groups
    counts = tuple(
        count for count in range(1, groups + 1) if not family.heads_divide_width or width % (count * shared) == 0
    )
    return _group([*of_queries, *of_keys], numbers, tensors, counts if family.heads_divide_width else ())


def _hidden_units(found: StockTransformer, layer: str, tensors: Mapping[str, Tensor]) -> DependencyGroup:
    family = found.family
    places = [place for path in family.mlp_inputs for place in found.outputs_of(joined(layer, path))]
    places += found.inputs_of(joined(layer, family.mlp_output))
    return _group(places, {each: torch.arange(tensors[each.tensor].shape[each.dim]) for each in places}, tensors)


def _group(
    places: Collection[Place],
    numbers: Mapping[Place, Tensor],
    tensors: Mapping[str, Tensor],
    counts: tuple[int, ...] = (),
) -> DependencyGroup:
    """Return a group from the channel number of each position along the dimension of each place."""
    members = []
    for place in places:
        shape = [-1 if dim == place.dim else 1 for dim in range(tensors[place.tensor].ndim)]
        members.append(Member(place.tensor, numbers[place].reshape(shape)))
    units = int(max(int(each.max()) for each in numbers.values())) + 1
    width = min(member.channels.numel() // units for member in members)
    return DependencyGroup(members[0].tensor, units, width, tuple(members), counts)


def first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return each name of a tensor -> its first name, another one only for tied tensors."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()}


def _by_first_name(group: DependencyGroup, names: Mapping[str, str]) -> tuple[Member, ...]:
    """Return the members of a group, those of tied tensors once."""
    found = {names[each.tensor]: replace(each, tensor=names[each.tensor]) for each in reversed(group.members)}
    return tuple(reversed(found.values()))


def _tensors(found: StockTransformer, uses: Mapping[str, int]) -> dict[str, Held]:
    tensors = found.tensors
    names = first_names(tensors)
    held = {}
    for name, tensor in tensors.items():
        if names[name] == name:
            module = found.modules[name.rpartition(".")[0]]
            outputs = int(type(module).__name__ == "Conv1D" and tensor.ndim == 2)
            held[name] = Held(
                tensor.shape, tensor.itemsize, isinstance(tensor, nn.Parameter), uses.get(name, 0), outputs
            )
    return held


def _costs(
    model: nn.Module, example: Any, found: StockTransformer, groups: list[DependencyGroup]
) -> tuple[dict[str, int], tuple[Multiplied, ...]]:
    """Return name -> multiplications of each entry of a weight, and the products of activations, for an example."""
    counter = counted(model, example, MaskSet({}))
    names = first_names(found.tensors)
    uses: dict[str, int] = {}
    for name, own in counter.uses.items():
        uses[names[name]] = uses.get(names[name], 0) + sum(each.times for each in own)
    products = []
    for path, cost in counter.layers.items():
        if rule_of(counter.modules[path]) is None:
            products.append(_product(found, groups, path, cost.total))
    return uses, tuple(products)


def _product(found: StockTransformer, groups: list[DependencyGroup], path: str, macs: int) -> Multiplied:
    """Return the products that a module computes besides those of weights: in attention, by groups of heads."""
    layer = next((each for each in found.layers if path == each or path.startswith(f"{each}.")), None)
    channels: dict[str, Tensor] = {}
    for group in groups if layer is not None else ():
        own = [member for member in group.members if member.tensor.startswith(f"{path}.")]
        if group.name == joined(found.base, found.family.layers) and own:
            channels[group.name] = own[0].channels.reshape(-1)[:1]
        elif own and group.name == joined(str(layer), found.family.queries, "weight"):
            channels[group.name] = torch.arange(group.units)
    size = max((len(each) for each in channels.values()), default=1)
    members = tuple((name, Member(path, numbers)) for name, numbers in channels.items())
    return Multiplied(torch.Size([size]), macs // size, members)
