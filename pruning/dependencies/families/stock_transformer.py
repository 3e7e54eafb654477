"""Find the stock transformer in a model: its family, its layers, and the tensors that hold each unit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from pruning.choices.axes import FamilyUnit
from pruning.dependencies.families.family import MODEL_TYPES, Family, family_of
from pruning.holding.parameter import plain_modules, plain_parameters, plain_tensors


@dataclass(frozen=True)
class Place:
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
    def layers(self) -> tuple[str, ...]:
        """Names of the layers in the model."""
        path = joined(self.base, self.family.layers)
        return tuple(joined(path, name) for name, _ in self.modules[path].named_children())

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

    def outputs_of(self, path: str) -> Iterator[Place]:
        """Yield the places of a layer's outputs in its weight and its bias."""
        module = self.modules.get(path)
        for leaf, parameter in plain_parameters(module) if module is not None else ():
            last = parameter.ndim - 1
            yield Place(joined(path, leaf), last if type(module).__name__ == "Conv1D" else 0)

    def inputs_of(self, path: str) -> Iterator[Place]:
        """Yield the place of a layer's inputs in its weight."""
        module = self.modules.get(path)
        if module is not None:
            yield Place(joined(path, "weight"), 0 if type(module).__name__ == "Conv1D" else 1)

    def stream(self) -> Iterator[Place]:
        """Yield the places of the residual stream's channels, in everything that reads, writes or normalises them."""
        family, known = self.family, self.tensors
        outside = {joined(self.base, name): dim for name, dim in family.stream.items()}
        outside |= {joined(self.path, name): dim for name, dim in family.readers.items()}
        for name, dim in outside.items():
            if name in known:
                yield Place(name, dim)
        for layer in self.layers:
            for norm in family.norms:
                yield from self.outputs_of(joined(layer, norm))
            for reader in (family.queries, *family.keys_and_values, *family.mlp_inputs):
                yield from self.inputs_of(joined(layer, reader))
            for writer in (family.attention_output, family.mlp_output):
                yield from self.outputs_of(joined(layer, writer))


def joined(*parts: str) -> str:
    """Join parts of a name by dots, without empty ones."""
    return ".".join(part for part in parts if part)


def stock_transformer(model: nn.Module) -> StockTransformer | None:
    """Return the stock transformer that a model is or wraps; None if it is none, or holds more than one."""
    modules = dict(plain_modules(model))
    for path, network in modules.items():
        family = family_of(str(getattr(getattr(network, "config", None), "model_type", "")))
        prefix = str(getattr(network, "base_model_prefix", ""))
        base = joined(path, prefix if joined(path, prefix) in modules else "")
        if family is None or joined(base, family.layers) not in modules:
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
