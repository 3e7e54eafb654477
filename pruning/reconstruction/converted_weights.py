"""Tensors of files as tensors of a network: transformers renames, merges and splits the tensors of some networks.

A mixture of experts is the usual case: its files hold a matrix for each expert, and the network holds all of them in
one parameter. The rules are those of the library, chosen by the network's class; a file names no code.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Read = Callable[[str], Tensor]
"""Name of a tensor in the files -> the tensor."""


class Fault(NamedTuple):
    """Tensor of the files that is missing or has another shape.

    Args:
        name: name in the files, or in the network if the files name it otherwise.
        found: shape in the files; None if the tensor is missing.
        expected: shape that makes a tensor of the network.
    """

    name: str
    found: tuple[int, ...] | None
    expected: tuple[int, ...]


@dataclass(frozen=True)
class Conversion:
    """Tensors of files that make tensors of a network.

    Args:
        sources: names in the files.
        targets: names in the network; a source that the network lacks is its own target.
        convert: function that makes the targets; None: the one source is the one target.
    """

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    convert: Callable[[Read], dict[str, Tensor]] | None = None

    def tensors(self, read: Read) -> dict[str, Tensor]:
        """Return name -> each target, from the tensors that `read` returns."""
        return {self.targets[0]: read(self.sources[0])} if self.convert is None else self.convert(read)


@dataclass(frozen=True)
class Conversions:
    """Conversions of all tensors of some files, as `from_pretrained` of transformers makes them.

    Args:
        each: the conversions.
        faults: tensors that are missing, or have another shape, for conversions of several tensors.
        used: the library's rules that were applied; `save_pretrained` writes the names of the files by them.
    """

    each: tuple[Conversion, ...]
    faults: tuple[Fault, ...] = ()
    used: tuple[Any, ...] = ()


def conversions(model: nn.Module, held: Mapping[str, Tensor], wanted: Collection[str] | None = None) -> Conversions:
    """Return how tensors of files become those of a network; as they are, unless the network is one of transformers.

    Args:
        model: plain network; it is not changed.
        held: name -> tensor of the files; those on the meta device tell their shapes.
        wanted: names in the network that several tensors are converted for; None: all.
    """
    if not _is_pretrained(model):
        return Conversions(tuple(Conversion((name,), (name,)) for name in held))
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    network: Any = model
    own, prefix = network.state_dict(), network.base_model_prefix
    rules = get_model_conversion_mapping(network)
    renamings, converters = ([r for r in rules if isinstance(r, kind)] for kind in (WeightRenaming, WeightConverter))
    found: list[Conversion] = []
    merged: dict[str, dict[str, str]] = {}
    for name in sorted(held, key=dot_natural_key):  # the order of from_pretrained, which is that of the experts
        target, pattern = rename_source_key(name, renamings, converters, prefix, own)
        if target not in own and name in own:
            target, pattern = rename_source_key(name, [], [], prefix, own)
        if target in own and pattern is not None:
            merged.setdefault(target, {})[name] = pattern
        elif target in own or not _is_ignored(network, target):
            found.append(Conversion((name,), (target if target in own else name,)))
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    made: list[Conversion] = []
    faults: list[Fault] = []
    for target, patterns in merged.items():
        if wanted is not None and target not in wanted:
            continue
        rule = by_pattern[next(iter(patterns.values()))]
        convert = partial(_converted, network, rule, target, patterns, own[target].dtype)
        tensors = _shapes(convert, held)
        made.append(Conversion(tuple(patterns), tuple(tensors) or (target,), convert))
        faults += _misfits(tensors or {target: None}, own)
    faults = [*_misnamed(network, made, own, held)] or faults
    return Conversions((*found, *made), tuple(faults), tuple(rule for rule in rules if rule.was_used()))


def originals(model: nn.Module, tensors: Mapping[str, Tensor], used: Sequence[Any] | None = None) -> dict[str, Tensor]:
    """Return tensors of a network under the names and in the shapes in which `save_pretrained` writes them.

    Args:
        model: the network.
        tensors: name -> tensor of the network.
        used: `Conversions.used` of the files that the network was loaded from; None: the network's own.
    """
    if not _is_pretrained(model):
        return dict(tensors)
    from transformers.core_model_loading import revert_weight_conversion

    network: Any = model
    before = getattr(network, "_weight_conversions", None)
    network._weight_conversions = before if used is None else [*used]
    try:
        return dict(revert_weight_conversion(network, dict(tensors)))
    finally:
        network._weight_conversions = before


def _is_pretrained(model: nn.Module) -> bool:
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _is_ignored(network: Any, name: str) -> bool:
    """Return whether a network's class lists a tensor among those that its files may hold too many."""
    return any(re.search(each, name) for each in network._keys_to_ignore_on_load_unexpected or ())


def _converted(
    network: Any, rule: Any, target: str, patterns: Mapping[str, str], dtype: torch.dtype, read: Read
) -> dict[str, Tensor]:
    """Apply a rule of the library to the tensors that make a target, in the target's dtype."""
    fresh = deepcopy(rule)
    for name, pattern in patterns.items():
        fresh.add_tensor(target, name, pattern, lambda name=name: read(name).to(dtype))
    made = fresh.convert(target, model=network, config=network.config)
    return {name: each[0] if isinstance(each, list) else each for name, each in made.items()}


def _shapes(convert: Callable[[Read], dict[str, Tensor]], held: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the targets of a conversion on the meta device; empty if tensors are missing or do not fit together."""
    try:
        return convert(lambda name: held[name].to("meta"))
    except Exception:  # operations of the library raise many types; what is wrong is said by the faults
        return {}


def _misfits(made: Mapping[str, Tensor | None], own: Mapping[str, Tensor]) -> Iterator[Fault]:
    """Yield the targets that the network has in other shapes, or that are missing."""
    for name, tensor in made.items():
        found = None if tensor is None else tuple(tensor.shape)
        if name in own and found != tuple(own[name].shape):
            yield Fault(name, found, tuple(own[name].shape))


def _misnamed(
    network: nn.Module, made: Sequence[Conversion], own: Mapping[str, Tensor], held: Mapping[str, Tensor]
) -> Iterator[Fault]:
    """Yield what differs from the files that `save_pretrained` would write; nothing for files of an older form."""
    targets = {name: own[name].detach().to("meta") for each in made for name in each.targets if name in own}
    expected = originals(network, targets) if targets else {}
    if not any(name in expected for each in made for name in each.sources):
        return
    for name, tensor in expected.items():
        found = tuple(held[name].shape) if name in held else None
        if found != tuple(tensor.shape):
            yield Fault(name, found, tuple(tensor.shape))
