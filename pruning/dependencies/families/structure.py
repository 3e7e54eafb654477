"""The structure of a stock transformer: which parts of which tensors follow which key of its configuration.

Nothing here knows names of modules. The stock class is built on the meta device with one key changed, and the shapes of
its tensors are compared with those of the unchanged one. Where shapes leave several readings, all are returned, for a
proof to choose among them.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce, wraps
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pruning.dependencies.families.family import Keys
from pruning.graph.tracing import quiet
from pruning.holding.parameter import joined

_R = TypeVar("_R")
Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
Nodes: TypeAlias = list[tuple[str, Any]]
"""Path and value of each configuration inside that of a network."""
Axis: TypeAlias = tuple[str, int]
"""Name of a tensor, and one of its dimensions."""
HIDDEN_UNITS = (
    *("intermediate_size", "ffn_dim", "d_ff", "dff", "dim_ff", "n_inner", "ffn_hidden_size", "mlp_dim", "hidden_dim"),
    *("ffn_size", "inner_dim", "ffn_inner_dim", "feed_forward_size", "intermediate_dim"),
)
HEADS = ("num_attention_heads", "attention_heads", "num_heads", "n_head", "n_heads", "n_layer_heads")
GROUPS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_key_value_groups")
HEAD_SIZES = ("head_dim", "d_kv", "dim_head", "kv_channels", "attention_head_size", "d_head")
WIDTHS = ("hidden_size", "d_model", "n_embd", "dim", "embed_dim")
"""Endings of keys of configurations, by their meaning."""
_IN_LAYER, _IN_LIST, _IN_NETWORK = re.compile(r"^(.*?\.\d+)\."), re.compile(r"^(.*?)\.\d+\."), re.compile(r"^()")
"""Parts of a network that lose the same heads: one layer, the layers of a list, or all layers and what they share."""


@dataclass(frozen=True)
class Layers:
    """Layers that one key of a configuration counts.

    Args:
        path: list of the layers in the network.
        count: number of layers.
        node: name of the configuration that has the keys, inside that of the network; "" for that itself.
        keys: keys that tell layers apart.
        stays: numbers of layers without which the class builds other tensors.
        kinds: numbers of the layers of each kind; of one kind are layers of equal tensors and entries of the keys.
        norms_after: whether norms follow the residual additions, so that a masked layer still normalises.
        keeps_kinds: whether the last layer of each kind stays.
    """

    path: str
    count: int
    node: str
    keys: Keys
    stays: frozenset[int] = frozenset()
    kinds: tuple[tuple[int, ...], ...] = ()
    norms_after: bool = False
    keeps_kinds: bool = False

    @property
    def name(self) -> tuple[str, ...]:
        """Name of the keys, for the same reading of another network."""
        return self.path, joined(self.node, self.keys.layers)

    @property
    def label(self) -> Any:
        """The reading, whatever the number of layers."""
        return self.keys, self.keeps_kinds

    def sizes(self, config: Any, kept: Sequence[int]) -> dict[str, Any]:
        """Return the keys of a configuration for some of the layers."""
        node = node_of(config, self.node)
        own = self.keys.of_layers(node, kept)
        if len(names := getattr(node, "stage_names", None) or ()) == self.count + 1:  # a backbone names its layers
            last = names[len(kept)]
            own |= {"stage_names": names[: len(kept) + 1], "_out_features": [last], "_out_indices": [len(kept)]}
        return {joined(self.node, key): value for key, value in own.items()}

    def shapes(self, whole: Shapes, kept: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are left with some of the layers."""
        numbers, start = {str(old): str(new) for new, old in enumerate(kept)}, f"{self.path}."
        found = {}
        for name, shape in whole.items():
            number, _, rest = name.removeprefix(start).partition(".")
            if not name.startswith(start):
                found[name] = shape
            elif number in numbers:
                found[f"{start}{numbers[number]}.{rest}"] = shape
        return found


@dataclass(frozen=True)
class Width:
    """Width that keys of a configuration set: heads, or hidden units of MLPs.

    Args:
        units: number of units of each group.
        keys: key -> its value for each unit; a list has one for each layer.
        fixed: key -> its value, whatever the number of units.
        groups: axis -> number of the unit at each position, -1 for none; one mapping for each layer.
        counts: numbers of units that the class builds, ascending; empty: any number.
        order: how units lie along dimensions that allow several readings.
    """

    units: int
    keys: Mapping[str, int | list[int]]
    fixed: Mapping[str, int]
    groups: tuple[Mapping[Axis, Tensor], ...] = ()
    counts: tuple[int, ...] = ()
    order: Any = None

    @property
    def name(self) -> tuple[str, ...]:
        """Name of the keys, for the same reading of another network."""
        return tuple(self.keys)

    @property
    def label(self) -> Any:
        """The reading, whatever the number of layers."""
        return self.order

    def sizes(self, count: int) -> dict[str, Any]:
        """Return the keys of a configuration with some of the units."""
        own = {
            key: [v * count for v in each] if isinstance(each, list) else each * count
            for key, each in self.keys.items()
        }
        return {**own, **self.fixed}


def node_of(config: Any, path: str) -> Any:
    """Return the configuration at a path inside another one."""
    return reduce(getattr, path.split("."), config) if path else config


def value_of(config: Any, key: str) -> Any:
    """Return the value of a key of a configuration, which may be inside one of its own; None without one."""
    path, _, leaf = key.rpartition(".")
    return getattr(node_of(config, path), leaf, None)


def resized(config: Any, sizes: Mapping[str, Any]) -> Any:
    """Return a copy of a configuration with other values of some keys, which may be inside one of its own."""
    made = copy.deepcopy(config)
    for key, value in sizes.items():
        path, _, leaf = key.rpartition(".")
        setattr(node_of(made, path), leaf, value)
    return made


def shapes_of(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a network."""
    return {name: tuple(tensor.shape) for name, tensor in network.state_dict(keep_vars=True).items()}


def built_shapes(kind: Any, config: Any, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes that a class builds with other sizes in a saved configuration; None if it builds none."""
    try:
        with quiet(), torch.device("meta"):
            made = resized(config, sizes)
            return shapes_of(kind(type(made).from_dict(made.to_dict())))
    except Exception:  # a configuration and a class may refuse sizes in any way
        return None


def _built(network: Any, sizes: Mapping[str, Any]) -> dict[str, tuple[int, ...]] | None:
    return built_shapes(type(network), network.config, sizes)


def _nodes(config: Any, path: str = "", only_text: bool = True) -> Iterator[tuple[str, Any]]:
    """Yield each configuration inside another one; where one is of text, those of other inputs may be left out."""
    inside = {key: value for key, value in vars(config).items() if hasattr(value, "model_type")}
    if only_text and "text_config" in inside:
        yield from _nodes(inside["text_config"], joined(path, "text_config"))
        return
    yield path, config
    for key, value in inside.items():
        yield from _nodes(value, joined(path, key), only_text)


def _of_text_first(read: Callable[[Any, Nodes], list[list[_R]]]) -> Callable[[Any], list[list[_R]]]:
    """Let a function read the configurations of text, and all of them if a network of images has nothing of text."""

    @wraps(read)
    def read_text_first(network: Any) -> list[list[_R]]:
        found = read(network, [*_nodes(network.config)])
        if not found and network.main_input_name == "pixel_values":
            return read(network, [*_nodes(network.config, only_text=False)])
        return found

    return read_text_first


def _numbers(node: Any) -> dict[str, int]:
    """Return the numbers of a configuration that may be sizes."""
    return {key: value for key, value in vars(node).items() if type(value) is int and value > 0 and "token" not in key}


def _lists(node: Any) -> dict[str, Sequence[Any]]:
    """Return the lists of a configuration that may tell layers apart."""
    named = {key: value for key, value in vars(node).items() if isinstance(value, list | tuple)}
    return {key: value for key, value in named.items() if "token" not in key and not key.startswith("_out")}


# ---------------------------------------------------------------------------------------------------------- layers


@_of_text_first
def layer_readings(network: nn.Module, nodes: Nodes) -> list[list[Layers]]:
    """Return the readings of each list of layers that a key of the configuration counts, the likeliest first."""
    config, whole, found = network.config, shapes_of(network), []
    for path, module in network.named_modules():
        count = len(module._modules)
        if count < 2 or [*module._modules] != [str(number) for number in range(count)]:
            continue
        for name, node in nodes:
            for key in (key for key, value in _numbers(node).items() if value == count):
                lists = [each for each, entries in _lists(node).items() if len(entries) == count]
                named = [each for each in lists if "layer" in each or "block" in each]
                readings = []
                for own in dict.fromkeys((tuple(named), tuple(lists))):
                    layers, fewer = Layers(path, count, name, Keys(layers=key, by_layer=own)), range(count - 1)
                    if _built(network, layers.sizes(config, fewer)) == layers.shapes(whole, fewer):
                        readings += _readings(network, whole, layers)
                found += [sorted(readings, key=lambda each: len(each.stays))] if readings else []
    return found


def _readings(network: nn.Module, whole: Shapes, layers: Layers) -> list[Layers]:
    """Return layers with each reading of the other keys that tell layers apart."""
    node, count = node_of(network.config, layers.node), layers.count
    lists = tuple(
        key
        for key, value in _lists(node).items()
        if 0 < len(value) < count and all(type(each) is int and 0 <= each < count for each in value)
    )
    firsts = []
    for key, value in _numbers(node).items():
        made = _built(network, {joined(layers.node, key): value - 1}) if value < count else None
        firsts += [key] if made is not None and {*made} != {*whole} else []  # it tells which tensors layers have
    guesses = [layers.keys, *([replace(layers.keys, numbers=lists)] if lists else [])]
    guesses += [replace(layers.keys, numbers=lists, first=(key,)) for key in firsts]
    found = []
    for keys in guesses:
        reading = _with_needed(network, whole, replace(layers, keys=keys))
        last = {numbers[-1] for numbers in reading.kinds if len(reading.kinds) > 1}
        found += [reading, replace(reading, stays=reading.stays | last, keeps_kinds=True)]
    return [each for each in found if len(each.stays) < count]


def _with_needed(network: nn.Module, whole: Shapes, layers: Layers) -> Layers:
    """Return layers with their kinds, and with those that stay: kinds of which none can go alone."""
    node, every = node_of(network.config, layers.node), range(layers.count)
    lists = [getattr(node, key) for key in layers.keys.by_layer]
    kinds: dict[Any, list[int]] = defaultdict(list)
    for number in every:
        start = f"{layers.path}.{number}."
        own = tuple((name.removeprefix(start), whole[name]) for name in whole if name.startswith(start))
        kinds[own, tuple(str(each[number]) for each in lists)].append(number)

    def can_go(gone: Sequence[int]) -> bool:
        kept = [number for number in every if number not in gone]
        return _built(network, layers.sizes(network.config, kept)) == layers.shapes(whole, kept)

    stays = [
        numbers if not can_go(numbers[:1]) else numbers[-1:] if not can_go(numbers) else []
        for numbers in kinds.values()
    ]
    return replace(layers, stays=frozenset(itertools.chain(*stays)), kinds=tuple(map(tuple, kinds.values())))


# ---------------------------------------------------------------------------------------------------------- widths


@_of_text_first
def mlp_readings(network: nn.Module, nodes: Nodes) -> list[list[Width]]:
    """Return the readings of each width of MLPs that a key of the configuration sets, the likeliest first."""
    whole, found = shapes_of(network), []
    for name, node in nodes:
        for key in (each for each in vars(node) if each.endswith(HIDDEN_UNITS)):
            value = getattr(node, key)
            size = value if type(value) is int and value > 1 else _unset(network, whole, joined(name, key), value)
            if size:
                step = Width(size, {joined(name, key): 1}, {})
                found.append(_width_readings(network, whole, step, ("turns", "blocks")))
    return [readings for readings in found if readings]


def _unset(network: nn.Module, whole: Shapes, key: str, value: Any) -> int | None:
    """Return the width that a class takes where its key has no value; None if the key sets none."""
    made, tried = _built(network, {key: 64}) if value is None else None, 64
    sizes = {
        whole[name][dim] * tried // size
        for name in (made or {})
        for dim, size in enumerate((made or {})[name])
        if size != whole[name][dim]
    }
    return sizes.pop() if len(sizes) == 1 else None


@_of_text_first
def heads_readings(network: nn.Module, nodes: Nodes) -> list[list[Width]]:
    """Return the readings of each number of heads that keys of the configuration set, the likeliest first.

    A unit is a key and value head with the query heads that read it; a query head if there is one key and value head.
    """
    whole, found = shapes_of(network), []
    for name, node in nodes:
        for key, heads in _numbers(node).items():
            ending = next((each for each in HEADS if key.endswith(each)), None)
            if ending is None or heads < 2 or key.endswith(GROUPS):
                continue
            start, own = key.removesuffix(ending), vars(node)
            shared = next((start + each for each in GROUPS if type(own.get(start + each)) is int), None)
            groups = own[shared] if shared else heads
            if heads % groups:
                continue
            units = groups if groups > 1 else heads
            keys: dict[str, Any] = {joined(name, key): heads // units}
            keys |= {joined(name, shared): 1} if shared and groups > 1 else {}
            keys |= {joined(name, each): [v // units for v in own[each]] for each in _heads_by_layer(node, key, units)}
            size, fixed = _head_size(name, node, start, heads)
            parts = (heads * size, groups * size)
            width = Width(units, keys, fixed)
            readings = _width_readings(network, whole, width, ("blocks", "parts", "pairs"), parts)
            if units % 2 == 0 and units > 2 and readings:
                pairs = replace(
                    width, units=units // 2, keys={each: 2 * v for each, v in keys.items() if type(v) is int}
                )
                readings += _width_readings(network, whole, pairs, ("halves",), parts)
            found.append(readings)
    return [readings for readings in found if readings]


def _heads_by_layer(node: Any, key: str, units: int) -> list[str]:
    """Return the lists of a configuration with a number of heads for each layer."""
    lists = _lists(node)
    return [
        each for each in lists if each.startswith(key) and all(type(v) is int and v % units == 0 for v in lists[each])
    ]


def _head_size(name: str, node: Any, start: str, heads: int) -> tuple[int, dict[str, int]]:
    """Return the size of a head, and its key with a value if the configuration would derive it otherwise."""
    own = vars(node)
    known = next((own[start + each] for each in HEAD_SIZES if type(own.get(start + each)) is int), None)
    if known:
        return known, {}
    wide = next((own[each] for each in WIDTHS if type(own.get(each)) is int), 0)
    unset = next((start + each for each in HEAD_SIZES if start + each in own), f"{start}head_dim")
    return wide // heads, {joined(name, unset): wide // heads}


def _width_readings(
    network: nn.Module, whole: Shapes, width: Width, orders: Sequence[str], parts: tuple[int, ...] = ()
) -> list[Width]:
    """Return a width with each reading of the order of its units along a dimension.

    `parts` are the sizes of queries, and of keys. Heads, which have such parts, may be the same in all layers.
    """
    fewer = width.units - 1
    made = _built(network, width.sizes(fewer))
    if made is None and width.units > 3:
        fewer = width.units // 2
        made = _built(network, width.sizes(fewer))
    if made is None or {*made} != {*whole}:
        return []
    axes: dict[Axis, int] = {}
    for name, shape in made.items():
        for dim, size in enumerate(shape):
            step, rest = divmod(whole[name][dim] - size, width.units - fewer)
            if step < 0 or rest:
                return []
            if step:
                axes[name, dim] = step
    if not axes:
        return []
    if twice := next((name for name, _ in axes if sum(name == each for each, _ in axes) > 1), None):
        raise ValueError(f"{twice!r} has them along two dimensions")
    if fewer < width.units - 1:
        able = [count for count in range(1, width.units) if _built(network, width.sizes(count)) is not None]
        width = replace(width, counts=(*able, width.units))
    found: list[Width] = []
    alike = (_IN_LAYER, _IN_LIST, _IN_NETWORK) if parts else (_IN_LAYER,)
    for start, order, first in itertools.product(alike, orders, (True, False)):
        channels = {
            (name, dim): _positions(
                whole[name][dim], width.units, step, "blocks" if dim and order == "halves" else order, first, parts
            )
            for (name, dim), step in axes.items()
        }
        groups = tuple(_by_layer(channels, start))
        reading = replace(width, groups=groups, order=(start, order, first))
        if not any(_equal(reading, other) for other in found):
            found.append(reading)
    return found


def _positions(size: int, units: int, step: int, order: str, first: bool, parts: tuple[int, ...]) -> Tensor:
    """Return the unit at each of `size` positions, `step` for each unit; -1 for others, at the end or start."""
    numbers = torch.arange(units)
    turns = step if order == "turns" else 2 if order == "halves" else 1
    own = numbers.repeat_interleave(step // turns).repeat(turns)
    many, few = parts or (0, 0)
    for lengths in {"parts": ((many, few, few),), "pairs": ((few, few), (many, many))}.get(order, ()):
        if sum(lengths) == len(own):
            own = torch.cat([numbers.repeat_interleave(each // units) for each in lengths])
            break
    others = torch.full((size - len(own),), -1)
    return torch.cat([own, others] if first else [others, own])


def _by_layer(channels: Mapping[Axis, Tensor], start: re.Pattern[str]) -> Iterator[Mapping[Axis, Tensor]]:
    """Yield the axes of each layer, or of all layers; those outside of all are one layer more."""
    layers: dict[str, dict[Axis, Tensor]] = defaultdict(dict)
    for axis, own in channels.items():
        inside = start.match(axis[0])
        layers[inside[1] if inside else ""][axis] = own
    yield from layers.values()


def _equal(one: Width, other: Width) -> bool:
    pairs = zip(one.groups, other.groups, strict=False)
    return len(one.groups) == len(other.groups) and all(
        torch.equal(mine[axis], theirs[axis]) for mine, theirs in pairs for axis in mine
    )
