"""The stock transformer in a model: its family, its layers, and the dependency groups that its family defines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from pruning.choices.axes import FAMILY_UNITS, FamilyUnit, Scope, Unit
from pruning.dependencies.dependency_groups import (
    DependencyGroup,
    DependencyGroups,
    Held,
    Member,
    Multiplied,
    held_tensors,
)
from pruning.dependencies.expert_groups import expert_groups, hidden_units, widths
from pruning.dependencies.families.family import MODEL_TYPES, Family, family_of
from pruning.holding.parameter import first_names, joined, plain_modules, plain_parameters, plain_tensors
from pruning.layouts import TRANSPOSED_LINEAR, kind_of, layout_of, required_layout
from pruning.masks.mask_set import MaskSet
from pruning.measure.macs import counted
from pruning.mixtures.finding import Mixture, mixtures


@dataclass(frozen=True)
class ParameterAxis:
    """Dimension of a tensor along which channels lie."""

    tensor: str
    dim: int


@dataclass(frozen=True)
class StockTransformer:
    """A network of a known family, in a model that may wrap it.

    Args:
        family: its family.
        network: the whole network with its head, such as `LlamaForCausalLM`.
        path: name of the network in the model; "" if it is the model.
        base: name of the base network in the model, such as "model" for `LlamaModel`.
        modules: name -> module of the model, without wrappers.
    """

    family: Family
    network: nn.Module
    path: str
    base: str
    modules: Mapping[str, nn.Module]

    @property
    def config(self) -> Any:
        """Configuration of the network."""
        return self.network.config

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        """Name in the plain model -> each parameter and buffer, under all names of a tied one."""
        return plain_tensors(self.modules.items())

    @cached_property
    def first_names(self) -> dict[str, str]:
        """Each name of a tensor -> its first name."""
        return first_names(self.tensors)

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers in the model."""
        path = joined(self.base, self.family.layers)
        return tuple(joined(path, name) for name, _ in self.modules[path].named_children())

    @cached_property
    def mixtures(self) -> tuple[Mixture, ...]:
        """Mixtures of experts in the model."""
        return mixtures(self.modules[""])

    def size(self, key: str) -> int:
        """Return a size of the configuration."""
        return int(getattr(self.config, key))

    @property
    def heads(self) -> int:
        """Number of attention heads of a layer."""
        return self.size(self.family.keys.heads)

    @property
    def head_groups(self) -> int:
        """Number of key and value heads of a layer."""
        key = self.family.keys.key_value_heads
        return self.size(key) if key else self.heads

    def outputs_of(self, path: str) -> Iterator[ParameterAxis]:
        """Yield the places of a layer's outputs in its weight and its bias."""
        module = self.modules.get(path)
        for leaf, _ in plain_parameters(module) if module is not None else ():
            layout = layout_of(module, leaf) if module is not None else None
            yield ParameterAxis(joined(path, leaf), layout.outputs if layout is not None else 0)

    def inputs_of(self, path: str) -> Iterator[ParameterAxis]:
        """Yield the place of a layer's inputs in its weight."""
        module = self.modules.get(path)
        if module is not None:
            yield ParameterAxis(joined(path, "weight"), required_layout(module).inputs)

    def stream(self) -> Iterator[ParameterAxis]:
        """Yield the places of the residual stream's channels, in everything that reads, writes or normalises them."""
        family, known = self.family, self.tensors
        outside = {joined(self.base, name): dim for name, dim in family.stream.items()}
        outside |= {joined(self.path, name): dim for name, dim in family.readers.items()}
        for name, dim in outside.items():
            if name in known:
                yield ParameterAxis(name, dim)
        for layer in self.layers:
            for norm in family.norms:
                yield from self.outputs_of(joined(layer, norm))
            for reader in (family.queries, *family.keys_and_values, *family.mlp_inputs):
                yield from self.inputs_of(joined(layer, reader))
            for writer in (family.attention_output, family.mlp_output):
                yield from self.outputs_of(joined(layer, writer))


def stock_transformer(model: nn.Module) -> StockTransformer | None:
    """Return the stock transformer that a model is or wraps; None if it is none, or holds more than one."""
    modules = dict(plain_modules(model))
    for path, network in modules.items():
        family = family_of(str(getattr(getattr(network, "config", None), "model_type", "")))
        prefix = str(getattr(network, "base_model_prefix", ""))
        bases = [joined(path, each) for each in (prefix, "model", "")]  # a prefix may be that of a larger network
        base = next((each for each in bases if family and joined(each, family.layers) in modules), None)
        if family is None or base is None:
            continue  # a wrapper may have the configuration of the network inside it
        if sum(1 for _ in model.parameters()) == sum(1 for _ in network.parameters()):
            return StockTransformer(family, network, path, base, modules)
    return None


def require_unit(model: nn.Module, unit: FamilyUnit) -> StockTransformer:
    """Return the stock transformer of a model, if its configuration can express fewer of a unit.

    Raises:
        ValueError: the model is of no known family, its configuration cannot express fewer of the unit, or one of its
            weights is no parameter.
    """
    found = stock_transformer(model)
    if found is None:
        raise ValueError(
            f"`unit.kind` (={unit!r}) is for networks of transformers whose model_type is one of {MODEL_TYPES}, "
            f"and `model` is a {type(model).__name__}; type unit='group', which traces any network."
        )
    require_plain_weights(found)
    check_unit(found, unit)
    return found


def require_plain_weights(found: StockTransformer) -> None:
    """Raise ValueError if a weight of a stock transformer is no parameter, as in quantised layers."""
    for path, module in found.modules.items():
        if getattr(module, "weight", None) is not None and joined(path, "weight") not in found.tensors:
            kind = type(module)
            raise ValueError(
                f"`model` (whose {path!r}, a {kind.__module__}.{kind.__name__}, has no parameter 'weight') must hold "
                "its weights as parameters; prune it, and call `smaller_transformer`, before it is quantised or "
                "parametrised."
            )


def check_unit(found: StockTransformer, unit: FamilyUnit) -> None:
    """Raise ValueError if the configuration of a stock transformer cannot express fewer of a unit."""
    family = found.family
    if unit in family.refused:
        raise ValueError(
            f"`unit.kind` (={unit!r}) cannot be pruned in a {type(found.network).__name__}: {family.refused[unit]}."
        )
    if not family.expresses(unit) or (unit in ("expert", "mlp") and family.keys.experts and not found.mixtures):
        raise ValueError(
            f"`unit.kind` (={unit!r}) cannot be pruned in a {type(found.network).__name__}, which has none by its "
            "configuration; prune another unit."
        )
    for key, value in family.needs.get(unit, {}).items():
        if getattr(found.config, key, value) != value:
            raise ValueError(
                f"`unit.kind` (={unit!r}) cannot be pruned in a {type(found.network).__name__} with {key}="
                f"{getattr(found.config, key)!r}; it needs {key}={value!r}: prune another unit."
            )
    if unit == "residual":
        _require_known_readers(found)


def expresses(found: StockTransformer, unit: FamilyUnit) -> bool:
    """Return whether the configuration of a stock transformer can express fewer of a unit."""
    try:
        check_unit(found, unit)
    except ValueError:
        return False
    return True


def _require_known_readers(found: StockTransformer) -> None:
    """Refuse a network with parameters of which the family does not say whether they hold the residual stream."""
    family = found.family
    known = {place.tensor for place in found.stream()} | {joined(found.base, name) for name in family.stream}
    inside = tuple(f"{layer}." for layer in found.layers)
    others = {name.rpartition(".")[0] for name in known}
    for name, tensor in found.tensors.items():
        is_parameter = isinstance(tensor, nn.Parameter)
        if is_parameter and not name.startswith(inside) and name not in known and name.rpartition(".")[0] not in others:
            raise ValueError(
                f"`unit.kind` (='residual') cannot be pruned in a {type(found.network).__name__}: nothing says whether "
                f"{name!r} reads the residual stream; prune unit='heads' or unit='mlp' instead."
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
    found = stock_transformer(model) if kind == "expert" else require_unit(model, kind)
    if found is None:
        tensors = held_tensors(plain_tensors(plain_modules(model)), {}, {})
        return DependencyGroups(tuple(expert_groups(model, spared)), tensors, unit, scope)
    if scope.budget == "macs" and example is None:
        raise ValueError(
            "`example` (=None) must be an input of the network if `scope.budget` is 'macs': multiply-accumulates are "
            "counted on it; pass a batch of inputs."
        )
    names = found.first_names
    spared = {*spared, *_weights_of_needed(found)} if kind == "layer" else spared
    groups = [replace(each, members=_by_first_name(each, names)) for each in unit_groups(found, kind, spared)]
    others = [
        replace(each, members=_by_first_name(each, names))
        for other in FAMILY_UNITS
        if other != kind and expresses(found, other)
        for each in unit_groups(found, other)
    ]
    uses, products = _costs(model, example, found, [*groups, *others]) if scope.budget == "macs" else ({}, ())
    made = DependencyGroups(tuple(groups), _tensors(found, uses), unit, scope, products, tuple(others))
    if not made.equal_widths and any(group.pools > 1 for group in groups):
        raise ValueError(
            f"`scope.kind` (={scope.kind!r}) cannot be combined with `unit.kind` (={kind!r}) in a mixture, whose "
            "experts keep equally many hidden units; type scope.kind='layer', or scope.uniform=True."
        )
    return made


def _weights_of_needed(found: StockTransformer) -> list[str]:
    """Return the weights of the last layer with the module that one layer must have, if not all layers have it."""
    needed = [layer for layer in found.layers if joined(layer, found.family.needed) in found.modules]
    last = needed[-1:] if len(needed) < len(found.layers) else []
    return [name for layer in last for name in found.tensors if name.startswith(f"{layer}.")]


def unit_groups(found: StockTransformer, kind: FamilyUnit, spared: Collection[str] = ()) -> Iterator[DependencyGroup]:
    """Yield the groups of a stock transformer for a unit, under any of the names of a tied tensor."""
    if kind == "layer":
        yield _layers(found, spared)
    elif kind == "expert":
        yield from expert_groups(found.modules[""], spared)
    elif kind == "residual":
        width = found.size(found.family.keys.residual)
        counts = range(found.heads, width + 1, found.heads) if found.family.heads_divide_width else ()
        yield _group(found, {place: torch.arange(width) for place in found.stream()}, tuple(counts))
    else:
        for layer in found.layers:
            if kind == "mlp":
                yield from _hidden_units(found, layer)
            elif joined(layer, found.family.queries) in found.modules:  # linear attention has heads of its own
                yield _heads(found, layer)


def _layers(found: StockTransformer, spared: Collection[str]) -> DependencyGroup:
    tensors = found.tensors
    inside = {layer: [name for name in tensors if name.startswith(f"{layer}.")] for layer in found.layers}
    free = [names for names in inside.values() if not {*names} & {*spared}]
    norms = tuple(f".{norm}." for norm in found.family.norms) if found.family.norms_after else ()
    members = tuple(
        Member(name, torch.full((1,) * tensors[name].ndim, number), not any(norm in name for norm in norms))
        for number, names in enumerate(free)
        for name in names
    )
    return DependencyGroup(joined(found.base, found.family.layers), len(free), 1, members)


def _heads(found: StockTransformer, layer: str) -> DependencyGroup:
    family, groups = found.family, found.head_groups
    of_queries = [*found.outputs_of(joined(layer, family.queries))]
    of_queries += found.inputs_of(joined(layer, family.attention_output))
    for path in (joined(layer, each) for each in family.beside_queries):
        of_queries += [ParameterAxis(path, 0)] if path in found.tensors else found.outputs_of(path)
    of_keys = [place for path in family.keys_and_values for place in found.outputs_of(joined(layer, path))]
    numbers = {
        place: torch.arange(groups).repeat_interleave(found.tensors[place.tensor].shape[place.dim] // groups)
        for place in (*of_queries, *of_keys)
    }
    width, shared = found.size(family.keys.residual), found.heads // groups
    counts = tuple(
        count for count in range(1, groups + 1) if not family.heads_divide_width or width % (count * shared) == 0
    )
    return _group(found, numbers, counts if family.heads_divide_width else ())


def _hidden_units(found: StockTransformer, layer: str) -> Iterator[DependencyGroup]:
    family, inside = found.family, [each for each in found.mixtures if each.experts.startswith(f"{layer}.")]
    yield from (hidden_units(each, found.modules[each.experts]) for each in inside)
    places = [place for path in family.mlp_inputs for place in found.outputs_of(joined(layer, path))]
    places += found.inputs_of(joined(layer, family.mlp_output))
    if not places:  # a layer of a mixture whose width is another key's
        return
    group = _group(found, {each: torch.arange(found.tensors[each.tensor].shape[each.dim]) for each in places})
    if inside:  # as wide as one expert, or several
        width = found.size(family.keys.mlp)
        counts = widths(found.tensors[group.name], width)
        group = replace(group, counts=counts, pools=group.units // width)
    yield group


def _group(
    found: StockTransformer, numbers: Mapping[ParameterAxis, Tensor], counts: tuple[int, ...] = ()
) -> DependencyGroup:
    """Return a group from the channel number of each position along the dimension of each place."""
    members = []
    for place, own in numbers.items():
        shape = [-1 if dim == place.dim else 1 for dim in range(found.tensors[place.tensor].ndim)]
        members.append(Member(place.tensor, own.reshape(shape)))
    units = int(max(int(each.max()) for each in numbers.values())) + 1
    width = min(member.channels.numel() // units for member in members)
    return DependencyGroup(members[0].tensor, units, width, tuple(members), counts)


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
        if group.name == joined(found.base, found.family.layers) and own:
            channels[group.name] = own[0].channels.reshape(-1)[:1]
        elif own and group.name == joined(str(layer), found.family.queries, "weight"):
            channels[group.name] = torch.arange(group.units)
    size = max((len(each) for each in channels.values()), default=1)
    members = tuple((name, Member(path, numbers)) for name, numbers in channels.items())
    return Multiplied(torch.Size([size]), macs // size, members)
