"""Cutting of a stock transformer: what pruning left of it, and the network of its class with these sizes and values."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from pruning.choices.axes import EQUAL_WIDTHS, FamilyUnit
from pruning.dependencies.dependency_groups import DependencyGroup, any_of
from pruning.dependencies.families.stock_transformer import Sizes, StockTransformer, head_size
from pruning.dependencies.families.structure import resized
from pruning.graph.tracing import output_difference
from pruning.holding.parameter import joined
from pruning.measure.macs import in_mode
from pruning.mixtures.survivors import survivors

_T = TypeVar("_T")
Call: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]
"""Arguments of a network, by position and by name."""


class Left(NamedTuple):
    """Place of a smaller network's tensor in the whole one, and the factor that its values were multiplied by.

    Args:
        name: name of the whole tensor.
        positions: dimension -> positions of the whole tensor that are left, ascending; all of other dimensions are. A
            stack has a row of positions for each expert of the whole tensor, where each keeps hidden units of its own.
        factor: factor of the values.
    """

    name: str
    positions: Mapping[int, Tensor]
    factor: float


@dataclass
class Cut:
    """Kept parts of a network: layers by number, positions of tensors by dimension, factors of tensors, sizes."""

    layers: list[int]
    positions: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    left: dict[str, Left] = field(default_factory=dict)


def cut_of(found: StockTransformer) -> Cut:
    """Decide what a smaller network keeps."""
    cut = Cut(list(range(len(found.layers))))
    for group in _groups(found, "layer"):
        cut.layers = _kept(found, [group], cut, "layer")[0].tolist()
    if len(cut.layers) < len(found.layers):
        cut.sizes |= found.layer_sizes(cut.layers)
        if found.norms_after:
            cut.differs.append("the masked network keeps the norms of removed layers, which this one has not")
    for unit in EQUAL_WIDTHS:
        for groups, sizes in found.sized(unit) if found.expresses(unit) else ():
            _cut_widths(found, unit, groups, sizes, cut)
    for group in _groups(found, "residual"):
        (kept_channels,) = _kept(found, [group], cut, "residual")
        if len(kept_channels) < group.units:
            _narrow(found, cut, group.units, len(kept_channels))
    _require_whole_mixtures(found, cut)
    cut.sizes |= _ties(found)
    return cut


def _require_whole_mixtures(found: StockTransformer, cut: Cut) -> None:
    """Refuse a mixture without some of its experts, which no known key of the configuration counts."""
    kept = tuple(f"{found.layers[number]}." for number in cut.layers)
    for each in found.mixtures if not found.expresses("expert") else ():
        left = survivors(each)
        if bool(left.any()) and not bool(left.all()) and (each.experts.startswith(kept) or not found.layers):
            raise ValueError(
                f"`model` (a {type(found.network).__name__} with {int(left.sum())} of {each.count} experts in "
                f"{each.path!r}) must have all of them: nothing says which key of its configuration counts experts; "
                "prune it with unit='mlp' instead."
            )


def _cut_widths(
    found: StockTransformer, unit: FamilyUnit, groups: list[DependencyGroup], sizes: Sizes, cut: Cut
) -> None:
    """Record what the groups of a unit keep in the layers that are left, and the keys of the configuration."""
    removed = tuple(f"{layer}." for number, layer in enumerate(found.layers) if number not in cut.layers)
    groups = [group for group in groups if not group.name.startswith(removed)]
    kept = _kept(found, groups, cut, unit)
    if groups and len(kept[0]) < groups[0].units:
        if unit == "expert" and cut.padding.get(unit):
            raise ValueError(
                "`model` must have equally many experts that are not 0 in each layer, and in each group, since its "
                "configuration holds one number and routers choose empty ones, too; prune it with unit='expert'."
            )
        cut.sizes |= sizes(len(kept[0]) // groups[0].pools)


def _ties(found: StockTransformer) -> dict[str, Any]:
    """Return the key of the configuration that ties the head, if it does not say whether the head is tied."""
    pairs = getattr(found.network, "_tied_weights_keys", None) or {}
    tensors = [[found.tensors.get(joined(found.path, name)) for name in pair] for pair in pairs.items()]
    tied = all(head is embedding for head, embedding in tensors)
    return {"tie_word_embeddings": tied} if pairs and tied != getattr(found.config, "tie_word_embeddings", tied) else {}


def _groups(found: StockTransformer, unit: FamilyUnit) -> list[DependencyGroup]:
    """Return the groups of a unit; none if the configuration cannot express fewer of them."""
    return list(found.groups(unit)) if found.expresses(unit) else []


def _factors(found: StockTransformer, unit: FamilyUnit) -> tuple[str, ...]:
    """Return the modules in a layer by which the output of a unit is multiplied: it is 0 if one of them is."""
    family = found.family
    if unit == "heads":
        return (*family.keys_and_values[1:], family.attention_output)
    if family.keys.experts:  # whose stacks hold gates and values
        return ()
    return (*family.mlp_inputs[1:], family.mlp_output)  # the first one goes through the activation function


def _kept(found: StockTransformer, groups: list[DependencyGroup], cut: Cut, unit: FamilyUnit) -> list[Tensor]:
    """Return the channels that each group keeps, equally many; record their positions, and the empty ones."""
    factors = _factors(found, unit) if unit in ("heads", "mlp") else ()
    alive = [_alive(group, found.tensors, factors).view(group.pools, -1) for group in groups]
    most = max((int(each.sum(1).max()) for each in alive), default=0)
    kept = []
    for group, own in zip(groups, alive, strict=True):
        count = next((each for each in group.counts if each >= most), max(most, 1))
        first = torch.argsort(own.to(torch.uint8), dim=1, stable=True, descending=True)[:, :count].sort(1).values
        kept.append((first + group.pool * torch.arange(group.pools)[:, None]).flatten())
        if padding := count * max(1, int(own.any(1).sum())) - int(own.sum()):  # removed experts are no padding
            cut.padding[unit] = cut.padding.get(unit, 0) + padding
        if count < group.pool:
            _record(group, kept[-1], cut)
    return kept


def _alive(group: DependencyGroup, tensors: Mapping[str, Tensor], factors: tuple[str, ...]) -> Tensor:
    """Return bool for each channel: whether it has entries that are not 0, in each of the factors if there are any."""
    filled = {name: torch.zeros(group.units, dtype=torch.bool) for name in factors or ("",)}
    for member in group.members:
        tensor, path = tensors[member.tensor], member.tensor.rpartition(".")[0]
        if member.masked and isinstance(tensor, nn.Parameter):
            here = any_of((tensor != 0).cpu(), member.channels) & (member.channels >= 0)
            for name in filled:
                filled[name][member.channels[here]] |= path.endswith(name)
    return torch.stack([*filled.values()]).all(0)


def _record(group: DependencyGroup, kept: Tensor, cut: Cut) -> None:
    """Record the positions that a group keeps in its tensors."""
    for member in (each for each in group.members if each.dims):  # a layer goes with all of its tensors
        *stacked, dim = member.dims
        channels, own = member.channels, cut.positions.setdefault(member.tensor, {})
        positions = ((channels < 0) | torch.isin(channels, kept)).squeeze().nonzero()[:, -1]
        if stacked:
            own[dim] = positions.view(len(channels), -1)
        else:
            own[dim] = positions[torch.isin(positions, own.get(dim, positions))]


def _narrow(found: StockTransformer, cut: Cut, before: int, after: int) -> None:
    """Record the sizes and factors of a narrower residual stream.

    With d' of d channels, x / sqrt(sum x^2 / d + eps) = c x / sqrt(sum x^2 / d' + c^2 eps), where c = sqrt(d / d').
    Norms of heads share eps: multiplying the heads by c, too, leaves their outputs as they are.
    """
    family, squared = found.family, before / after
    cut.sizes |= {family.keys.residual: after, **head_size(found)}
    cut.sizes[family.keys.norm_eps] = getattr(found.config, family.keys.norm_eps) * squared
    norms = [joined(layer, norm) for layer in found.layers for norm in family.norms]
    norms += [joined(found.base, name).rpartition(".")[0] for name in family.stream if "norm" in name]
    for norm in norms:
        cut.factors[joined(norm, "weight")] = math.sqrt(squared)
    for layer in found.layers:
        for norm, projection in family.head_norms.items():
            if joined(layer, norm) in found.modules:
                for place in found.outputs_of(joined(layer, projection)):
                    cut.factors[place.tensor] = math.sqrt(squared)
    if found.base == found.path:
        cut.differs.append("the hidden states that it returns have only the channels that are left")
    if not family.root_mean_square:
        cut.differs.append(
            "LayerNorm subtracts the mean of all channels of the masked network, and of fewer in this one"
        )


def build(found: StockTransformer, cut: Cut) -> Any:
    """Return a network of the same class with the sizes and values that are kept."""
    network: Any = found.network
    config = resized(network.config, cut.sizes)
    vars(config).pop("quantization_config", None)
    with _expressible(network, cut), torch.random.fork_rng(devices=[]):
        smaller = type(network)(config)
    state, frozen = {}, set()
    learned = dict(network.named_parameters(remove_duplicate=False))
    for name, new, tensor in _renamed(found, cut, network.state_dict()):
        cut.left[new] = place = Left(name, cut.positions.get(name, {}), cut.factors.get(name, 1.0))
        state[new] = _values(tensor, place.positions, place.factor)
        own = name.removeprefix(f"{found.path}.")
        if own in learned and not learned[own].requires_grad:
            frozen.add(new)
    with _expressible(network, cut):
        smaller.load_state_dict(state, assign=True)
    smaller.tie_weights()
    for name, parameter in smaller.named_parameters():
        parameter.requires_grad_(name not in frozen)
    _copy_states(found, cut, smaller, state)
    smaller.generation_config = copy.deepcopy(getattr(network, "generation_config", None))
    return smaller.to(next(iter(network.parameters())).device)


def _copy_states(found: StockTransformer, cut: Cut, smaller: nn.Module, state: Collection[str]) -> None:
    """Copy what is in no state dict: modes of modules, other buffers, and the length that rotary ones were made for."""
    mine = dict(smaller.named_modules())
    for module in mine.values():
        module.training = found.network.training
    for _, name, module in _renamed(found, cut, dict(found.network.named_modules())):
        if name in mine:
            mine[name].training = module.training
            if hasattr(module, "max_seq_len_cached"):
                mine[name].max_seq_len_cached = module.max_seq_len_cached
    buffers = dict(smaller.named_buffers())
    for _, name, buffer in _renamed(found, cut, dict(found.network.named_buffers())):
        if name not in state and name in buffers and buffers[name].shape == buffer.shape:
            path, _, leaf = name.rpartition(".")
            setattr(mine[path], leaf, buffer.detach().clone())


@contextmanager
def _expressible(network: Any, cut: Cut) -> Iterator[None]:
    """Raise ValueError if the class of a network builds no network of the sizes and tensors that are left."""
    try:
        yield
    except Exception as error:  # each configuration has checks and errors of its own
        said = " ".join(str(error).split())[:200]
        raise ValueError(
            f"`model` (a {type(network).__name__} with {cut.sizes}) cannot be built from its configuration: {said}; "
            "prune one unit, call `smaller_transformer`, then prune the next, and leave the arguments of the class at "
            "their defaults."
        ) from error


def _renamed(found: StockTransformer, cut: Cut, owned: Mapping[str, _T]) -> Iterator[tuple[str, str, _T]]:
    """Yield (name in the model, name in the smaller network, value) of what is kept, with layers numbered anew."""
    lists: dict[str, list[str]] = {}
    for old in cut.layers:
        lists.setdefault(found.layers[old].rpartition(".")[0], []).append(found.layers[old])
    numbers = {layer: new for layers in lists.values() for new, layer in enumerate(layers)}
    prefix = f"{found.path}." if found.path else ""
    for own, value in owned.items():
        name = prefix + own
        layer = next((each for each in found.layers if f"{name}.".startswith(f"{each}.")), None)
        if layer is None:
            yield name, own, value
        elif layer in numbers:
            moved = f"{layer.rpartition('.')[0]}.{numbers[layer]}{name.removeprefix(layer)}"
            yield name, moved.removeprefix(prefix), value


def _values(tensor: Tensor, positions: Mapping[int, Tensor], factor: float) -> Tensor:
    """Return a copy of the kept positions of a tensor, multiplied by a factor."""
    found = tensor.detach()
    for dim, kept in sorted(positions.items(), reverse=True):  # experts go after what goes within each
        kept = kept.to(found.device)
        if kept.ndim > 1:
            shape = [len(kept) if each == 0 else kept.shape[1] if each == dim else 1 for each in range(found.ndim)]
            found = found.take_along_dim(kept.reshape(shape), dim)
        else:
            found = found.index_select(dim, kept)
    return found.clone() if factor == 1 else (found * factor).to(tensor.dtype)


def difference(smaller: nn.Module, masked: nn.Module, call: Call) -> float | None:
    """Return the largest difference between the first outputs of two networks, relative to the largest output."""
    ours, theirs = first_output(smaller, call), first_output(masked, call)
    if ours.shape != theirs.shape:
        return None
    return output_difference([ours], [theirs])


def first_output(network: nn.Module, call: Call) -> Tensor:
    """Return the first output that is no loss, which is a number without dimensions."""
    with torch.no_grad(), in_mode(network, training=False):
        outputs = network(*call[0], **call[1])
    if isinstance(outputs, Tensor):
        return outputs
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return next(each for each in values if isinstance(each, Tensor) and each.ndim)
