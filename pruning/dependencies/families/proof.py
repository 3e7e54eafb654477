"""Stock transformers whose structure is read from shapes, and proven before it is used.

A twin of the network, with random values, loses units as a reading of its structure says. The reading is proven if the
stock class builds the smaller configuration, takes exactly the tensors that are left, and computes what the masked twin
computes, in float32 and float64.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves_with_path, tree_map

from pruning.choices.axes import FamilyUnit
from pruning.dependencies.dependency_groups import DependencyGroup, Member
from pruning.dependencies.expert_groups import widths
from pruning.dependencies.families.family import Family, Keys
from pruning.dependencies.families.resizing import Call, build, cut_of, first_output
from pruning.dependencies.families.stock_transformer import Sizes, StockTransformer, unit_groups
from pruning.dependencies.families.structure import (
    Layers,
    Width,
    built_shapes,
    heads_readings,
    layer_readings,
    mlp_readings,
    resized,
    shapes_of,
)
from pruning.graph.tracing import first_line, output_difference, quiet
from pruning.holding.parameter import joined, plain_modules
from pruning.mixtures.routing import eager_experts

Readings: TypeAlias = Mapping[FamilyUnit, tuple[Any, ...]]
TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-5}
"""Number format -> largest difference of outputs, relative to the largest; parts of some classes are always float32."""
FEW = 8
"""Largest number of layers of a twin whose layers are of one kind."""
READ: Mapping[str, tuple[Callable[[nn.Module], list[list[Any]]], str]] = {
    "layer": (layer_readings, "no key of its configuration is the number of a list of layers"),
    "heads": (heads_readings, "no keys of its configuration set the number of heads without their size"),
    "mlp": (mlp_readings, "no key of its configuration sets the number of hidden units"),
}
"""Unit -> what reads its structure, and why there may be none."""


class _Proof(NamedTuple):
    """Proven readings of a unit, and key of the configuration -> why what it counts is not proven."""

    readings: tuple[Any, ...]
    failures: Mapping[str, str]


_PROVEN: dict[tuple[type, str, str], _Proof] = {}
"""(class, configuration, unit) -> its proof, with at least one reading."""
_UNPROVEN: dict[tuple[Any, ...], str] = {}
"""The same with the shapes of an example -> why none is proven; on another example one may be."""

_OTHERWISE = "its first layers are read in another way than all of them"

BY_STRUCTURE = Family("by structure", (), Keys(), "", (), "", ())
"""The family of networks of no family, which says nothing."""


@dataclass(frozen=True)
class StructuredTransformer(StockTransformer):
    """A stock transformer of no family, whose units are proven by its structure.

    Args:
        call: arguments with which it is called for a proof; None: tokens are drawn.
        tried: unit -> readings that a proof tries; None: proven ones.
    """

    call: Call | None = None
    tried: Readings | None = None

    def parts(self, unit: FamilyUnit) -> tuple[Any, ...]:
        """Return the readings of a unit that are proven or tried.

        Raises:
            ValueError: none is proven.
        """
        if self.tried is not None:
            return self.tried.get(unit, ())
        return self._proof(unit).readings

    def _proof(self, unit: FamilyUnit) -> _Proof:
        found = _proof_of(self, unit)
        if isinstance(found, str):
            raise ValueError(
                f"`unit.kind` (={unit!r}) cannot be pruned in a {type(self.network).__name__}, whose structure is not "
                f"proven: {found}; prune another unit, or type unit='group', which traces any network."
            )
        return found

    @cached_property
    def stacks(self) -> tuple[Layers, ...]:
        """Lists of layers."""
        return self.parts("layer") if self.expresses("layer") else ()

    @cached_property
    def layers(self) -> tuple[str, ...]:
        return tuple(joined(self.path, each.path, str(n)) for each in self.stacks for n in range(each.count))

    @property
    def norms_after(self) -> bool:
        return any(each.norms_after for each in self.stacks)

    @property
    def layer_group(self) -> str:
        return joined(self.path, self.stacks[0].path) if self.stacks else ""

    @property
    def needed(self) -> list[str]:
        return [joined(self.path, each.path, str(number)) for each in self.stacks for number in sorted(each.stays)]

    def check(self, unit: FamilyUnit) -> None:
        """Raise ValueError if the configuration cannot express fewer of a unit, as far as is proven."""
        if unit not in READ:
            raise ValueError(
                f"`unit.kind` (={unit!r}) cannot be pruned in a {type(self.network).__name__}, whose model_type has no "
                "row in the table of families; prune unit='layer', unit='heads' or unit='mlp'."
            )
        if not self.parts(unit):
            raise ValueError(f"`unit.kind` (={unit!r}) has no reading that is tried.")
        for name, why in self._proof(unit).failures.items() if self.tried is None else ():
            said = f"removes nothing of what `{name}` counts in a {type(self.network).__name__}: {why}."
            warnings.warn(f"`unit.kind` (={unit!r}) {said}", stacklevel=2)

    def expresses(self, unit: FamilyUnit) -> bool:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # `check` says what stays whole of the unit that is pruned
            return super().expresses(unit)

    def are_heads(self, group: DependencyGroup) -> bool:
        return self.expresses("heads") and any(group.name == each.name for each in self.groups("heads"))

    def layer_sizes(self, kept: Sequence[int]) -> dict[str, Any]:
        sizes: dict[str, Any] = {}
        start = 0
        for each in self.stacks:
            own = [number - start for number in kept if start <= number < start + each.count]
            sizes |= each.sizes(self.config, own) if len(own) < each.count else {}
            start += each.count
        return sizes

    def groups(self, unit: FamilyUnit, spared: Collection[str] = ()) -> Iterator[DependencyGroup]:
        if unit == "layer":
            yield from unit_groups(self, unit, spared)
        for groups, _ in self.sized(unit) if unit != "layer" else ():
            yield from groups

    def sized(self, unit: FamilyUnit) -> Iterator[tuple[list[DependencyGroup], Sizes]]:
        for width in self.parts(unit):
            yield [self._group(width, axes) for axes in width.groups], width.sizes

    def _group(self, width: Width, axes: Mapping[tuple[str, int], Tensor]) -> DependencyGroup:
        members = [self._member(name, dim, own) for (name, dim), own in axes.items()]
        size = min(int((each.channels == 0).sum()) for each in members)
        stacked = {name for mixture in self.mixtures for name in mixture.stacks}
        stacks = [self.tensors[each.tensor] for each in members if each.tensor in stacked]
        counts = width.counts or (widths(stacks[0], width.units) if stacks else ())
        return DependencyGroup(members[0].tensor, width.units, size, tuple(members), counts)

    def _member(self, name: str, dim: int, own: Tensor) -> Member:
        name = joined(self.path, name)
        if name not in self.tensors or self.tensors[name].shape[dim] != len(own):
            raise ValueError(
                f"`model` (a {type(self.network).__name__}) must have the tensors that its class builds from its "
                f"configuration, and {name!r} is another one; set the sizes in `config` as they are."
            )
        shape = [-1 if each == dim else 1 for each in range(self.tensors[name].ndim)]
        return Member(name, own.reshape(shape))

    def keeps(self, name: str) -> bool:
        """Whether the masked network keeps a tensor of a removed layer: that of a norm after the addition."""
        return self.norms_after and "norm" in type(self.modules[name.rpartition(".")[0]]).__name__.lower()


def _proof_of(found: StructuredTransformer, unit: FamilyUnit) -> _Proof | str:
    """Return the proof of a unit, or why there is none; it is made once in a process."""
    key = (type(found.network), found.config.to_json_string(use_diff=False), unit)
    if key in _PROVEN:
        return _PROVEN[key]
    if (call := found.call or drawn_tokens(found.network)) is None:
        return "a network that reads other inputs than tokens is proven on an example; pass `example`"
    forms = tuple((str(path), getattr(leaf, "shape", None)) for path, leaf in tree_leaves_with_path(call))
    if (*key, forms) not in _UNPROVEN:
        with torch.random.fork_rng(devices=[]), quiet():
            proof = _prove(found, unit, call)
        if proof.readings:
            return _PROVEN.setdefault(key, proof)
        _UNPROVEN[(*key, forms)] = next(iter(proof.failures.values()))
    return _UNPROVEN[(*key, forms)]


def drawn_tokens(network: Any) -> Call | None:
    """Return tokens for a network that reads tokens; None for another one."""
    if getattr(network, "main_input_name", "") != "input_ids":
        return None
    generator = torch.Generator().manual_seed(0)
    table = network.get_input_embeddings()
    last = int(getattr(table, "num_embeddings", 0)) or int(network.config.vocab_size)
    names = ("input_ids", *(["decoder_input_ids"] if network.config.is_encoder_decoder else []))
    device = next(network.parameters()).device
    return (), {name: torch.randint(last // 8, last, (2, 12), generator=generator).to(device) for name in names}


def _prove(found: StructuredTransformer, unit: FamilyUnit, call: Call) -> _Proof:
    """Prove the readings of a unit, one by one."""
    read, none = READ[unit]
    network: Any = found.network
    try:
        with torch.device("meta"):
            whole = type(network)(copy.deepcopy(network.config))
        parts, few = read(whole), _few_layers(whole)
        twin = _twin(network, resized(network.config, few))
        tried = {each[0].name: each for each in (read(twin) if few else parts)}
    except Exception as error:  # a class may refuse to be built from its configuration in any way
        return _Proof((), {"": f"its structure cannot be read ({first_line(error)})"})
    proven, failures = [], {}
    for readings in parts:
        reading = _first_proven(twin, unit, tried.get(readings[0].name, []), call)
        same = [each for each in readings if not isinstance(reading, str) and each.label == reading.label]
        if not same:
            failures[readings[0].name[-1]] = reading if isinstance(reading, str) else _OTHERWISE
        elif isinstance(reading, Layers):
            proven.append(replace(same[0], norms_after=reading.norms_after))
        else:
            proven.append(same[0])
    if unit == "layer" and len(proven) > 1:  # a network has at least one layer of each list
        proven = [each if each.stays else replace(each, stays=frozenset({each.count - 1})) for each in proven]
    return _Proof(tuple(proven), failures if proven or failures else {"": none})


def _first_proven(twin: Any, unit: FamilyUnit, readings: Sequence[Any], call: Call) -> Any:
    """Return the first reading that is proven; why the likeliest is not, if none is."""
    failures = []
    for reading in readings:
        after = [replace(reading, norms_after=True)] if isinstance(reading, Layers) else []
        for each in (reading, *after):
            failures.append(_failure(twin, unit, each, call))
            if not failures[-1]:
                return each
    return next(iter(failures), _OTHERWISE)


def _few_layers(network: Any) -> dict[str, Any]:
    """Return the keys of the configuration for the first layers of each list, with layers of all kinds."""
    sizes: dict[str, Any] = {}
    for first, *_ in layer_readings(network):
        few = range(max(FEW, *(1 + kind[0] for kind in first.kinds)))
        shapes = first.shapes(shapes_of(network), few)
        if (
            len(few) < first.count
            and built_shapes(type(network), network.config, own := first.sizes(network.config, few)) == shapes
        ):
            sizes |= own
    return sizes


def _twin(network: Any, config: Any) -> Any:
    """Return a network of the same class whose values, of biases and norms too, are random."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed would seed the GPUs, too
    twin = type(network)(config).float().eval().to(next(network.parameters()).device)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in twin.parameters():
            spread = 0.1 if parameter.ndim < 2 else 0.5 / max(parameter.shape[-1], 1) ** 0.5
            parameter += (spread * torch.randn(parameter.shape, generator=generator)).to(parameter.device)
        for name, buffer in twin.named_buffers():
            if name in twin.state_dict() and buffer.is_floating_point():
                buffer *= (1 + 0.1 * torch.rand(buffer.shape, generator=generator)).to(buffer.device)
    return twin


def _failure(twin: Any, unit: FamilyUnit, reading: Any, call: Call) -> str:
    """Return why a reading is not proven; empty if it is."""
    for dtype, tolerance in TOLERANCES.items():
        try:
            before = _output(copy.deepcopy(twin).to(dtype), _in_dtype(call, dtype))
        except Exception as error:  # a class may fail in any way
            if dtype == torch.float64:  # some classes compute in float32 alone
                return ""
            return f"it does not run on the example ({first_line(error)})"
        for removed in _removals(unit, reading):
            try:
                ours, expected = _outputs_without(twin, unit, reading, removed, (dtype, call))
            except Exception as error:
                return f"the smaller network fails ({first_line(error)})"
            worst = output_difference([ours], [expected])
            if not worst < tolerance:
                return f"the smaller network computes something else than the masked one (by {worst:.1e} in {dtype})"
            if output_difference([before], [expected]) < 1e-3:
                return "the outputs of the network do not depend on them"
    return ""


def _outputs_without(
    twin: Any,
    unit: FamilyUnit,
    reading: Any,
    removed: Sequence[Collection[int]],
    asked: tuple[Any, Call],
) -> tuple[Tensor, Tensor]:
    """Return the outputs of the smaller twin, and of the masked one: with norms after, of one without the layers."""
    dtype, call = asked[0], _in_dtype(asked[1], asked[0])
    masked = copy.deepcopy(twin).to(dtype)
    found = StructuredTransformer(BY_STRUCTURE, masked, "", "", dict(plain_modules(masked)), call, {unit: (reading,)})
    _mask(found, unit, removed)
    smaller: Any = build(found, cut_of(found))
    if dtype == torch.float32 and built_shapes(type(smaller), smaller.config, {}) != shapes_of(smaller):
        raise ValueError("its configuration does not keep the sizes when it is saved")
    ours = _output(smaller, call)
    if not found.norms_after:
        return ours, _output(masked, call)
    whole = copy.deepcopy(twin).to(dtype)
    _leave_out(whole, found, removed)
    return ours, _output(whole, call)


def _removals(unit: FamilyUnit, reading: Any) -> Iterator[list[Collection[int]]]:
    """Yield for each group the units that a proof removes, so that any two groups lose different ones at least once."""
    generator = torch.Generator().manual_seed(0)
    if unit == "layer":
        free = [number for number in range(reading.count) if number not in reading.stays]
        few = free if len(free) < reading.count else free[:-1]
        yield [few[::2]]
        if len(free) > 1:
            yield [free[1::2]]
        if len(reading.kinds) > 1:
            yield from ([kind] for kind in reading.kinds if not {*kind} & reading.stays)
        if len(reading.kinds) > 2:  # and those of one kind alone
            others: list[Collection[int]] = [[n for n in free if n not in kind] for kind in reading.kinds]
            yield from ([gone] for gone in others if gone)
        return
    below = [count for count in reading.counts or range(1, reading.units + 1) if count < reading.units]
    gone, order = (
        reading.units - below[2 * len(below) // 3],
        torch.randperm(reading.units, generator=generator).tolist(),
    )
    either, groups = (order[:gone], order[-gone:]), range(len(reading.groups))
    for bit in range(max(1, groups[-1].bit_length())):
        yield [either[number >> bit & 1] for number in groups]


def _mask(found: StructuredTransformer, unit: FamilyUnit, removed: Sequence[Collection[int]]) -> None:
    with torch.no_grad():
        for group, gone in zip(found.groups(unit), removed, strict=True):
            for member in (each for each in group.members if each.masked):
                tensor = found.tensors[member.tensor]
                if isinstance(tensor, nn.Parameter):
                    tensor.mul_(~torch.isin(member.channels, torch.tensor([*gone])).to(tensor.device))


def _in_dtype(call: Call, dtype: torch.dtype) -> Call:
    """Return arguments with their numbers in a format."""
    found: Call = tree_map(lambda each: each.to(dtype) if getattr(each, "dtype", None) in TOLERANCES else each, call)
    return found


def _output(network: nn.Module, call: Call) -> Tensor:
    """Return the first output; experts multiply one after another, because their products together take no float64."""
    with eager_experts(network):
        return first_output(network, call)


def _leave_out(network: nn.Module, found: StructuredTransformer, removed: Sequence[Collection[int]]) -> None:
    """Let removed layers return their inputs."""

    def pass_on(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return given if isinstance(outputs, Tensor) else (given, *outputs[1:])

    for number in removed[0]:
        network.get_submodule(found.layers[number]).register_forward_hook(pass_on, with_kwargs=True)
