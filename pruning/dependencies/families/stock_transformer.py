"""The stock transformer in a model: its family, its layers, and the units that its family defines."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from pruning.choices.axes import FamilyUnit
from pruning.dependencies.dependency_groups import DependencyGroup, Member
from pruning.dependencies.expert_groups import expert_groups, hidden_units, widths
from pruning.dependencies.families.family import Family
from pruning.holding.parameter import first_names, joined, plain_parameters, plain_tensors
from pruning.layouts import layout_of, required_layout
from pruning.mixtures.finding import Mixture, mixtures

Sizes: TypeAlias = Callable[[int], dict[str, Any]]
"""Number of units -> keys of the configuration with their values."""


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

    @property
    def norms_after(self) -> bool:
        """Whether norms follow the residual additions, so that a masked layer still normalises."""
        return self.family.norms_after

    def keeps(self, name: str) -> bool:
        """Whether the masked network keeps a tensor of a removed layer: that of a norm after the addition."""
        return self.norms_after and any(f".{norm}." in name for norm in self.family.norms)

    @property
    def layer_group(self) -> str:
        """Name of the group of layers."""
        return joined(self.base, self.family.layers)

    @property
    def needed(self) -> list[str]:
        """Layers that stay: the last one with the module that one layer must have, if not all layers have it."""
        needed = [layer for layer in self.layers if joined(layer, self.family.needed) in self.modules]
        return needed[-1:] if len(needed) < len(self.layers) else []

    def are_heads(self, group: DependencyGroup) -> bool:
        """Whether the channels of a group are heads."""
        return any(group.name == joined(layer, self.family.queries, "weight") for layer in self.layers)

    def layer_sizes(self, kept: Sequence[int]) -> dict[str, Any]:
        """Return the keys of the configuration with some of the layers."""
        return self.family.keys.of_layers(self.config, kept)

    def groups(self, unit: FamilyUnit, spared: Collection[str] = ()) -> Iterator[DependencyGroup]:
        """Yield the groups of a unit, under any name of a tied tensor; layers with a spared weight are left out."""
        return unit_groups(self, unit, spared)

    def sized(self, unit: FamilyUnit) -> Iterator[tuple[list[DependencyGroup], Sizes]]:
        """Yield the groups that keep equally many units, and what gives the keys of the configuration for a number."""
        yield list(self.groups(unit)), lambda count: sizes_of(self, unit, count)

    def check(self, unit: FamilyUnit) -> None:
        """Raise ValueError if the configuration cannot express fewer of a unit."""
        family = self.family
        if unit in family.refused:
            raise ValueError(
                f"`unit.kind` (={unit!r}) cannot be pruned in a {type(self.network).__name__}: {family.refused[unit]}."
            )
        if not family.expresses(unit) or (unit in ("expert", "mlp") and family.keys.experts and not self.mixtures):
            raise ValueError(
                f"`unit.kind` (={unit!r}) cannot be pruned in a {type(self.network).__name__}, which has none by its "
                "configuration; prune another unit."
            )
        for key, value in family.needs.get(unit, {}).items():
            if getattr(self.config, key, value) != value:
                raise ValueError(
                    f"`unit.kind` (={unit!r}) cannot be pruned in a {type(self.network).__name__} with {key}="
                    f"{getattr(self.config, key)!r}; it needs {key}={value!r}: prune another unit."
                )
        if unit == "residual":
            _require_known_readers(self)

    def expresses(self, unit: FamilyUnit) -> bool:
        """Return whether the configuration can express fewer of a unit."""
        try:
            self.check(unit)
        except ValueError:
            return False
        return True

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
    members = tuple(
        Member(name, torch.full((1,) * tensors[name].ndim, number), not found.keeps(name))
        for number, names in enumerate(free)
        for name in names
    )
    return DependencyGroup(found.layer_group, len(free), 1, members)


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


def sizes_of(found: StockTransformer, unit: FamilyUnit, count: int) -> dict[str, Any]:
    """Return the sizes of a configuration with `count` groups of heads or hidden units."""
    keys = found.family.keys
    if unit == "mlp":
        return {keys.mlp: count}
    if unit == "expert":
        (first, *_) = found.mixtures
        return {str(keys.experts): count * first.groups}
    sizes: dict[str, Any] = {keys.heads: count * (found.heads // found.head_groups)}
    if keys.key_value_heads:
        sizes[keys.key_value_heads] = count
    return sizes | head_size(found)


def head_size(found: StockTransformer) -> dict[str, Any]:
    """Return the size of a head, which the configuration would otherwise derive; empty if it has no such key."""
    if (key := found.family.keys.head_size) is None:
        return {}
    readers = (joined(layer, found.family.attention_output) for layer in found.layers)
    (place,) = next(own for path in readers if (own := [*found.inputs_of(path)]))
    return {key: found.tensors[place.tensor].shape[place.dim] // found.heads}
