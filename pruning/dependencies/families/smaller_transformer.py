"""`pruning.smaller_transformer`: the stock network and configuration of the sizes that pruning left."""

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
from pruning.dependencies.families.family import MODEL_TYPES
from pruning.dependencies.families.stock_transformer import (
    StockTransformer,
    expresses,
    require_plain_weights,
    stock_transformer,
    unit_groups,
)
from pruning.graph.tracing import output_difference
from pruning.holding.copies import values_with_history
from pruning.holding.parameter import check_all_have_values, hooked, joined, pruned_names, unwrapped
from pruning.measure.macs import arguments_of, eagerly, in_mode
from pruning.measure.report import parameters
from pruning.methods.functions import remove_all
from pruning.mixtures.finding import mixtures

_T = TypeVar("_T")
_Call: TypeAlias = tuple[tuple[Any, ...], Mapping[str, Any]]


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


@dataclass(frozen=True)
class Resized:
    """Report of `smaller_transformer`, as plain data.

    Args:
        before, after: number of parameters; a tied one counts once.
        config: key of the configuration -> (value before, value after), where they differ.
        layers: numbers of the layers that were kept, counted before.
        padding: unit -> number of empty units that stay, because other layers have more or the configuration cannot
            express the number.
        differs: why the outputs differ from the masked network's; empty if they are equal up to rounding.
        difference: largest difference from the masked network's outputs on the example, relative to the largest output,
            without its loss; None without an example, and for hidden states with fewer channels.
        left: name of a tensor of the smaller network -> its place in the whole one.
    """

    before: int
    after: int
    config: Mapping[str, tuple[Any, Any]]
    layers: tuple[int, ...]
    padding: Mapping[str, int]
    differs: tuple[str, ...]
    difference: float | None = None
    left: Mapping[str, Left] = field(default_factory=dict, compare=False, repr=False)


@dataclass
class _Cut:
    """Kept parts of a network: layers by number, positions of tensors by dimension, factors of tensors, sizes."""

    layers: list[int]
    positions: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    factors: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, Any] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    left: dict[str, Left] = field(default_factory=dict)


def smaller_transformer(model: nn.Module, example: Any = None) -> nn.Module:
    """Build the stock network without the layers, heads, hidden units and residual channels that pruning emptied.

        pruning.prune(model, "magnitude", unit="mlp", sparsity=0.25)
        smaller = pruning.smaller_transformer(model)
        smaller.save_pretrained("smaller")             # `from_pretrained` of an unmodified transformers loads it

    The result has the class of the network and a configuration with the sizes left. Layers are numbered anew. All
    layers keep as many heads and hidden units as the layer with most of them; empty ones fill up the others. Without
    d - d' of d residual channels, the scale of a norm is multiplied by sqrt(d / d') and its eps by d / d', so that
    RMSNorm computes the same. The outputs equal the masked network's, with two exceptions that the report names:
    LayerNorm over fewer channels, and removed layers of networks that normalise after each addition (BERT).

    Args:
        model: a stock transformer of a known family, or a model that wraps one; pruned or not, it is not changed.
        example: input of the model, for the difference in the report; a mapping or a tuple is unpacked. In a wrapper,
            the difference is measured on the inputs that the network gets.

    Returns:
        the stock network, each module in the mode that it had; its attribute `resized` is the report, a `Resized`.

    Raises:
        ValueError: the model is of no known family, a tensor is on the meta device, a weight is no parameter (as in
            quantised layers), or a wrapper does not call its network on the example.
    """
    check_all_have_values(model)
    plain = unwrapped(model)
    if any(pruned_names(module) for module in plain.modules()):
        plain = copy.deepcopy(plain, values_with_history(plain))
        remove_all(plain)
    found = stock_transformer(plain)
    if found is None:
        raise ValueError(
            f"`model` (a {type(model).__name__}) must be a network of transformers whose model_type is one of "
            f"{MODEL_TYPES}; call pruning.shrink(model, example), which traces any network."
        )
    require_plain_weights(found)
    call = None if example is None else _call_of_network(plain, found, example)
    cut = _cut(found)
    smaller: nn.Module = _build(found, cut)
    before, after = found.config, smaller.config
    changed = {key: (getattr(before, key, None), getattr(after, key)) for key in cut.sizes}
    report = Resized(
        parameters(found.network),
        parameters(smaller),
        {key: (old, new) for key, (old, new) in changed.items() if old != new},
        tuple(cut.layers),
        cut.padding,
        tuple(cut.differs),
        None if call is None else _difference(smaller, found.network, call),
        cut.left,
    )
    smaller.resized = report  # type: ignore[assignment]
    return smaller


def _cut(found: StockTransformer) -> _Cut:
    """Decide what a smaller network keeps."""
    family = found.family
    cut = _Cut(list(range(len(found.layers))))
    for group in _groups(found, "layer"):
        cut.layers = _kept(found, [group], cut, "layer")[0].tolist()
    if len(cut.layers) < len(found.layers):
        cut.sizes |= family.keys.of_layers(found.config, cut.layers)
        if family.norms_after:
            cut.differs.append("the masked network keeps the norms of removed layers, which this one has not")
    layers = tuple(f"{found.layers[number]}." for number in cut.layers)
    for unit in EQUAL_WIDTHS:
        groups = [group for group in _groups(found, unit) if group.name.startswith(layers)]
        kept = _kept(found, groups, cut, unit)
        if groups and len(kept[0]) < groups[0].units:
            left = len(kept[0]) // groups[0].pools
            if unit == "expert" and cut.padding.get(unit):
                raise ValueError(
                    "`model` must have equally many experts that are not 0 in each layer, and in each group, since its "
                    "configuration holds one number and routers choose empty ones, too; prune it with unit='expert'."
                )
            cut.sizes |= _sizes_of(found, unit, left)
    for group in _groups(found, "residual"):
        (kept_channels,) = _kept(found, [group], cut, "residual")
        if len(kept_channels) < group.units:
            _narrow(found, cut, group.units, len(kept_channels))
    cut.sizes |= _ties(found)
    return cut


def _ties(found: StockTransformer) -> dict[str, Any]:
    """Return the key of the configuration that ties the head, if it does not say whether the head is tied."""
    pairs = getattr(found.network, "_tied_weights_keys", None) or {}
    tensors = [[found.tensors.get(joined(found.path, name)) for name in pair] for pair in pairs.items()]
    tied = all(head is embedding for head, embedding in tensors)
    return {"tie_word_embeddings": tied} if pairs and tied != found.config.tie_word_embeddings else {}


def _groups(found: StockTransformer, unit: FamilyUnit) -> list[DependencyGroup]:
    """Return the groups of a unit; none if the configuration cannot express fewer of them."""
    return list(unit_groups(found, unit)) if expresses(found, unit) else []


def _factors(found: StockTransformer, unit: FamilyUnit) -> tuple[str, ...]:
    """Return the modules in a layer by which the output of a unit is multiplied: it is 0 if one of them is."""
    family = found.family
    if unit == "heads":
        return (*family.keys_and_values[1:], family.attention_output)
    if family.keys.experts:  # whose stacks hold gates and values
        return ()
    return (*family.mlp_inputs[1:], family.mlp_output)  # the first one goes through the activation function


def _kept(found: StockTransformer, groups: list[DependencyGroup], cut: _Cut, unit: FamilyUnit) -> list[Tensor]:
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
        if count < group.pool and unit != "layer":
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


def _record(group: DependencyGroup, kept: Tensor, cut: _Cut) -> None:
    """Record the positions that a group keeps in its tensors."""
    for member in group.members:
        *stacked, dim = member.dims
        channels, own = member.channels, cut.positions.setdefault(member.tensor, {})
        positions = ((channels < 0) | torch.isin(channels, kept)).squeeze().nonzero()[:, -1]
        if stacked:
            own[dim] = positions.view(len(channels), -1)
        else:
            own[dim] = positions[torch.isin(positions, own.get(dim, positions))]


def _sizes_of(found: StockTransformer, unit: FamilyUnit, count: int) -> dict[str, Any]:
    """Return the sizes of a configuration with `count` groups of heads or hidden units."""
    keys = found.family.keys
    if unit == "mlp":
        return {keys.mlp: count}
    if unit == "expert":
        (first, *_) = mixtures(found.modules[""])
        return {str(keys.experts): count * first.groups}
    sizes: dict[str, Any] = {keys.heads: count * (found.heads // found.head_groups)}
    if keys.key_value_heads:
        sizes[keys.key_value_heads] = count
    return sizes | _head_size(found)


def _head_size(found: StockTransformer) -> dict[str, Any]:
    """Return the size of a head, which the configuration would otherwise derive from other sizes."""
    key = found.family.keys.head_size
    readers = (joined(layer, found.family.attention_output) for layer in found.layers)
    (place,) = next(own for path in readers if (own := [*found.inputs_of(path)]))
    return {str(key): found.tensors[place.tensor].shape[place.dim] // found.heads}


def _narrow(found: StockTransformer, cut: _Cut, before: int, after: int) -> None:
    """Record the sizes and factors of a narrower residual stream.

    With d' of d channels, x / sqrt(sum x^2 / d + eps) = c x / sqrt(sum x^2 / d' + c^2 eps), where c = sqrt(d / d').
    Norms of heads share eps: multiplying the heads by c, too, leaves their outputs as they are.
    """
    family, squared = found.family, before / after
    cut.sizes |= {family.keys.residual: after, **_head_size(found)}
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


def _build(found: StockTransformer, cut: _Cut) -> Any:
    """Return a network of the same class with the sizes and values that are kept."""
    network: Any = found.network
    config = copy.deepcopy(network.config)
    vars(config).pop("quantization_config", None)
    for key, value in cut.sizes.items():
        setattr(config, key, value)
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


def _copy_states(found: StockTransformer, cut: _Cut, smaller: nn.Module, state: Collection[str]) -> None:
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
def _expressible(network: Any, cut: _Cut) -> Iterator[None]:
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


def _renamed(found: StockTransformer, cut: _Cut, owned: Mapping[str, _T]) -> Iterator[tuple[str, str, _T]]:
    """Yield (name in the model, name in the smaller network, value) of what is kept, with layers numbered anew."""
    numbers = {found.layers[old]: new for new, old in enumerate(cut.layers)}
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


def _call_of_network(model: nn.Module, found: StockTransformer, example: Any) -> _Call:
    """Return the arguments with which a model calls its network on an example."""
    given = arguments_of(example)
    if found.network is model:
        return given
    calls: list[_Call] = []
    hook = found.network.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
    with hooked([hook]), torch.no_grad(), in_mode(model, training=False), eagerly():
        model(*given[0], **given[1])
    if not calls:
        raise ValueError(
            f"`model` (a {type(model).__name__}) must call its {found.path!r}, a {type(found.network).__name__}, on "
            "`example`, because the difference is measured on that call; pass this network with an example of its own, "
            "or no example."
        )
    return calls[0]


def _difference(smaller: nn.Module, masked: nn.Module, call: _Call) -> float | None:
    """Return the largest difference between the first outputs of two networks, relative to the largest output."""
    ours, theirs = _first_output(smaller, call), _first_output(masked, call)
    if ours.shape != theirs.shape:
        return None
    return output_difference([ours], [theirs])


def _first_output(network: nn.Module, call: _Call) -> Tensor:
    """Return the first output that is no loss, which is a number without dimensions."""
    with torch.no_grad(), in_mode(network, training=False):
        outputs = network(*call[0], **call[1])
    if isinstance(outputs, Tensor):
        return outputs
    values = outputs.values() if isinstance(outputs, Mapping) else outputs
    return next(each for each in values if isinstance(each, Tensor) and each.ndim)
