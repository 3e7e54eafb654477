"""Dependency groups of the units of stock transformers, and the stock transformer that a model is or wraps."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from pruning.choices.axes import FAMILY_UNITS, FamilyUnit, Scope, Unit
from pruning.dependencies.dependency_groups import (
    DependencyGroup,
    DependencyGroups,
    Held,
    Member,
    Multiplied,
    held_tensors,
)
from pruning.dependencies.expert_groups import expert_groups
from pruning.dependencies.families.family import family_of
from pruning.dependencies.families.proof import BY_STRUCTURE, StructuredTransformer
from pruning.dependencies.families.resizing import Call
from pruning.dependencies.families.stock_transformer import StockTransformer
from pruning.holding.parameter import hooked, joined, plain_modules, plain_tensors
from pruning.layouts import TRANSPOSED_LINEAR, kind_of
from pruning.masks.mask_set import MaskSet
from pruning.measure.macs import arguments_on, counted, eagerly, in_mode


def stock_transformer(model: nn.Module, example: Any = None) -> StockTransformer | None:
    """Return the stock transformer that a model is or wraps; None if it is none, or holds more than one.

    Args:
        model: pruned or not; it is not changed.
        example: input of the model, on which the structure of a network of no family is proven; None: drawn tokens.
    """
    modules, total = dict(plain_modules(model)), sum(1 for _ in model.parameters())
    for path, network in modules.items():
        family = family_of(str(getattr(getattr(network, "config", None), "model_type", "")))
        prefix = str(getattr(network, "base_model_prefix", ""))
        bases = [joined(path, each) for each in (prefix, "model", "")]  # a prefix may be that of a larger network
        base = next((each for each in bases if family and joined(each, family.layers) in modules), None)
        is_stock = type(network).__module__.startswith("transformers.") and hasattr(network, "base_model_prefix")
        if (base is None and (family or not is_stock)) or total != sum(1 for _ in network.parameters()):
            continue  # a wrapper may have the configuration of the network inside it
        if family and base is not None:
            return StockTransformer(family, network, path, base, modules)
        call = None if example is None else call_of_network(model, network, path, example)
        return StructuredTransformer(BY_STRUCTURE, network, path, path, modules, call)
    return None


def call_of_network(model: nn.Module, network: nn.Module, path: str, example: Any) -> Call:
    """Return the arguments with which a model calls its network on an example."""
    given = arguments_on(model, example)
    if network is model:
        return given
    calls: list[Call] = []
    hook = network.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with hooked([hook]), torch.no_grad(), in_mode(model, training=False), eagerly():
        model(*given[0], **given[1])
    if not calls:
        raise ValueError(
            f"`model` (a {type(model).__name__}) must call its {path!r}, a {type(network).__name__}, on "
            "`example`, because the difference is measured on that call; pass this network with an example of its own, "
            "or no example."
        )
    return calls[0]


def require_unit(model: nn.Module, unit: FamilyUnit, example: Any = None) -> StockTransformer:
    """Return the stock transformer of a model, if its configuration can express fewer of a unit.

    Raises:
        ValueError: the model is of no stock class, its configuration cannot express fewer of the unit, or one of its
            weights is no parameter.
    """
    found = stock_transformer(model, example)
    if found is None:
        raise ValueError(
            f"`unit.kind` (={unit!r}) is for networks of transformers, and `model` is a {type(model).__name__}; type "
            "unit='group', which traces any network."
        )
    require_plain_weights(found)
    found.check(unit)
    return found


def require_plain_weights(found: StockTransformer) -> None:
    """Raise ValueError if a weight of a stock transformer is no parameter, as in quantised layers.

    Structure covers what the class itself parametrises, as the convolution of positions in wav2vec2.
    """
    for path, module in found.modules.items():
        if isinstance(found, StructuredTransformer) and (is_parametrized(module) or isinstance(module, nn.ModuleDict)):
            continue
        if getattr(module, "weight", None) is not None and joined(path, "weight") not in found.tensors:
            kind = type(module)
            raise ValueError(
                f"`model` (whose {path!r}, a {kind.__module__}.{kind.__name__}, has no parameter 'weight') must hold "
                "its weights as parameters; prune it, and call `smaller_transformer`, before it is quantised or "
                "parametrised."
            )


def family_groups(
    model: nn.Module, unit: Unit, scope: Scope | None = None, example: Any = None, spared: Collection[str] = ()
) -> DependencyGroups:
    """Return the dependency groups of a stock transformer for units of its family; those of other units as `others`.

    Layers are the channels of one group, and so are the channels of the residual stream. Heads, hidden units and
    experts are the channels of one group for each layer. Experts need no family: mixtures are known by their structure.

    Args:
        model: pruned or not; it is not changed.
        unit: "layer", "heads", "mlp", "residual" or "expert"; not the two of "layer_and_mlp", pruned in turns.
        scope: how many are kept; `budget="macs"` needs an example.
        example: input of the network; a mapping or a tuple is unpacked.
        spared: names of weights; a layer with one of them is kept.

    Raises:
        ValueError: the configuration of the network cannot express fewer of these units, there is no example for
            multiply-accumulates, or the unit is two.
    """
    if unit.parts:
        raise ValueError(
            f"`unit.kind` (={unit.kind!r}) has no dependency groups of its own; ask for those of "
            f"{' or '.join(map(repr, unit.parts))}."
        )
    kind, scope = cast(FamilyUnit, unit.kind), scope or Scope()
    found = stock_transformer(model) if kind == "expert" else require_unit(model, kind, example)
    if found is None or (kind == "expert" and not found.expresses(kind) and family_of(found.config.model_type) is None):
        tensors = held_tensors(plain_tensors(plain_modules(model)), {}, {})
        return DependencyGroups(tuple(expert_groups(model, spared)), tensors, unit, scope)
    if scope.budget == "macs" and example is None:
        raise ValueError(
            "`example` (=None) must be an input of the network if `scope.budget` is 'macs': multiply-accumulates are "
            "counted on it; pass a batch of inputs."
        )
    names = found.first_names
    if kind == "layer":
        needed = tuple(f"{layer}." for layer in found.needed)
        spared = {*spared, *(name for name in found.tensors if name.startswith(needed))}
    groups = [replace(each, members=_by_first_name(each, names)) for each in found.groups(kind, spared)]
    others = [
        replace(each, members=_by_first_name(each, names))
        for other in FAMILY_UNITS
        if other != kind and found.expresses(other)
        for each in found.groups(other)
    ]
    uses, products = _costs(model, example, found, [*groups, *others]) if scope.budget == "macs" else ({}, ())
    made = DependencyGroups(tuple(groups), _tensors(found, uses), unit, scope, products, tuple(others))
    if not made.equal_widths and any(group.pools > 1 for group in groups):
        raise ValueError(
            f"`scope.kind` (={scope.kind!r}) cannot be combined with `unit.kind` (={kind!r}) in a mixture, whose "
            "experts keep equally many hidden units; type scope.kind='layer', or scope.uniform=True."
        )
    return made


def _by_first_name(group: DependencyGroup, names: Mapping[str, str]) -> tuple[Member, ...]:
    """Return the members of a group, those of tied tensors once."""
    found = {names[each.tensor]: replace(each, tensor=names[each.tensor]) for each in reversed(group.members)}
    return tuple(reversed(found.values()))


def _tensors(found: StockTransformer, uses: Mapping[str, int]) -> dict[str, Held]:
    transposed = [path for path, module in found.modules.items() if kind_of(module) is TRANSPOSED_LINEAR]
    return held_tensors(found.tensors, uses, {joined(path, "weight"): 1 for path in transposed}, found.mixtures)


def _costs(
    model: nn.Module, example: Any, found: StockTransformer, groups: list[DependencyGroup]
) -> tuple[dict[str, int], tuple[Multiplied, ...]]:
    """Return name -> multiplications of each entry of a weight, and the products of activations, for an example."""
    counter = counted(model, example, MaskSet({}))
    uses: dict[str, int] = {}
    for name, own in counter.uses.items():
        first = found.first_names[name]
        uses[first] = uses.get(first, 0) + sum(each.times for each in own)
    return uses, tuple(_product(found, groups, path, cost) for path, cost in counter.activations.items())


def _product(found: StockTransformer, groups: list[DependencyGroup], path: str, macs: int) -> Multiplied:
    """Return the products that a module computes besides those of weights: in attention, by groups of heads."""
    layer = next((each for each in found.layers if path == each or path.startswith(f"{each}.")), None)
    channels: dict[str, Tensor] = {}
    for group in groups if layer is not None else ():
        own = [member for member in group.members if member.tensor.startswith(f"{path}.")]
        if group.name == found.layer_group and own:
            channels[group.name] = own[0].channels.reshape(-1)[:1]
        elif own and found.are_heads(group):
            channels[group.name] = torch.arange(group.units)
    size = max((len(each) for each in channels.values()), default=1)
    members = tuple((name, Member(path, numbers)) for name, numbers in channels.items())
    return Multiplied(torch.Size([size]), macs // size, members)
