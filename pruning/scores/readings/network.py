"""Plain copies of a network for scores: a copy computes with v = m w, and a score may change it freely.

The copy's parameters share storage with the model's and are never written to; everything else belongs to the copy. A
score therefore leaves the model's parameters, buffers, gradients and modes unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pruning.holding.copies import copied, values_with_history
from pruning.holding.default_weights import default_weights, is_prunable
from pruning.holding.parameter import (
    ModuleParameter,
    check_all_have_values,
    check_has_values,
    check_prunable,
    drop_vacated,
    hooked,
    joined,
    place,
    plain_modules,
    plain_parameters,
    plain_weights,
    pruned_names,
    unwrapped,
)
from pruning.holding.reparam import masked
from pruning.layouts import WeightLayout, layout_of
from pruning.mixtures.survivors import route_among_survivors

BatchNormMode: TypeAlias = Literal["train", "eval"]
Masks: TypeAlias = Mapping[str, Tensor]
Key = TypeVar("Key")


@dataclass(frozen=True)
class Weight:
    """A scored parameter: `parameter` of the model, named `leaf` in `module`.

    `kept` is a bool tensor of the parameter's shape, True where an entry is kept; None if nothing is pruned.
    `disputed`: whether layers share the parameter whose layouts differ, such as a convolution and a transposed one.
    """

    module: nn.Module
    leaf: str
    parameter: Tensor
    kept: Tensor | None
    disputed: bool = False

    @property
    def layout(self) -> WeightLayout | None:
        """Meaning of the dimensions; None for a parameter of no known layer, or of layers that differ."""
        return None if self.disputed else layout_of(self.module, self.leaf)

    @property
    def stored(self) -> Tensor:
        """The values w, including those that the model still stores for pruned entries."""
        check_has_values(f"{type(self.module).__name__}.{self.leaf}", self.parameter)
        return self.parameter.detach()

    @property
    def value(self) -> Tensor:
        """The values v = m w that the network computes with."""
        return self.stored if self.kept is None else masked(self.stored, self.kept)


def weights_of(
    model: nn.Module, masks: Masks | None = None, parameters: Iterable[str] | None = None
) -> dict[str, Weight]:
    """Return qualified name -> weight, in the order of the model; a tied weight appears once.

    Args:
        model: dense or pruned; a parameter that this package or torch holds pruned keeps its name in the plain model.
        masks: name of any parameter -> further mask, nonzero where an entry is kept.
        parameters: names of the parameters to score; None: those of `default_weights`.

    Raises:
        ValueError: a name is not in the model; a mask has another shape; or there is nothing to score.
    """
    return _weights(model, _kept(model, masks or {}), parameters)


def _weights(model: nn.Module, kept: Mapping[int, Tensor], parameters: Iterable[str] | None) -> dict[str, Weight]:
    found: dict[str, Weight] = {}
    if isinstance(parameters, str):
        raise ValueError(f"`parameters` (={parameters!r}) must be names in a list; pass [{parameters!r}].")
    known = {
        name: Weight(module, leaf, parameter, kept.get(id(parameter)))
        for name, module, leaf, parameter in plain_weights(model)
    }
    layouts: dict[int, set[WeightLayout | None]] = {}
    for weight in known.values():
        layouts.setdefault(id(weight.parameter), set()).add(weight.layout)
    known |= {n: replace(each, disputed=True) for n, each in known.items() if len(layouts[id(each.parameter)]) > 1}
    if parameters is None:
        found = {name: known[name] for name in default_weights(model)}
    for name in parameters or ():
        require_name(model, name)
        if name not in known:
            raise ValueError(
                f"`parameters` (={name!r}) must name parameters of `model`, and {type(model).__name__} has none of "
                "that name."
            )
        found[name] = known[name]
    if not found:
        raise ValueError(
            f"`model` ({type(model).__name__}) must have a linear or convolutional layer to score, whose weight is "
            "computed from no other parameters; pass the names of other parameters as `parameters`."
        )
    return found


def computed_weights(model: nn.Module) -> list[str]:
    """Return the names of layers' weights that are computed from other parameters, as by weight_norm."""
    found = []
    for path, module in plain_modules(model):
        held = pruned_names(module)
        older = [n.removesuffix("_v").removesuffix("_orig") for n in module._parameters if n.endswith(("_v", "_orig"))]
        computed = [*getattr(module, "parametrizations", ()), *(leaf for leaf in older if leaf not in held)]
        found += [joined(path, each) for each in computed if hasattr(module, each) and is_prunable(module, each)]
    return found


def require_name(model: nn.Module, given: Any) -> None:
    """Raise TypeError unless an entry of `parameters` is a name; for a module with a name, say the qualified name."""
    if isinstance(given, str):
        return
    remedy = "pass names such as 'fc1.weight'"
    if isinstance(given, tuple) and len(given) == 2:
        path = next((path for path, module in plain_modules(model) if module is given[0]), None)
        remedy = remedy if path is None else f"pass {f'{path}.{given[1]}'.lstrip('.')!r}"
    raise TypeError(f"`parameters` (with a {type(given).__name__}) must hold names of parameters as strings; {remedy}.")


def _kept(model: nn.Module, masks: Masks) -> dict[int, Tensor]:
    """Return id of a parameter -> bool tensor, True where the model and `masks` both keep an entry."""
    found: dict[int, Tensor] = {}

    def add(parameter: Tensor, mask: Tensor) -> None:
        keeps = mask.detach().to(parameter.device)
        keeps = keeps if keeps.dtype == torch.bool else keeps != 0
        found[id(parameter)] = found[id(parameter)] & keeps if id(parameter) in found else keeps

    for _, module in plain_modules(model):
        for leaf in pruned_names(module):
            held = ModuleParameter.of(module, leaf)
            mask = held.mask
            assert mask is not None
            add(held.orig, mask)
    for name, mask in masks.items():
        module, leaf = place(model, name, mask.shape)
        add(dict(plain_parameters(module))[leaf], mask)
    return found


# --- the copy ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A plain copy of a model without dropout that computes with v = m w; `parameters` holds its scored weights."""

    model: nn.Module
    weights: Mapping[str, Weight]
    parameters: dict[str, nn.Parameter]

    def module_of(self, name: str) -> nn.Module:
        """Return the copy's module that owns the parameter `name`."""
        return self.model.get_submodule(name.rpartition(".")[0])

    def layers(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield (name of a scored weight, module) for each module of the copy that owns it as its weight."""
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        for module in self.model.modules():
            if id(module._parameters.get("weight")) in names:
                yield names[id(module._parameters["weight"])], module


@contextmanager
def layer_calls(
    layers: Iterable[tuple[Key, nn.Module]],
    read: Callable[[Key, nn.Module, Tensor, Any], None],
    *,
    keyword: str = "input",
    prepend: bool = False,
) -> Iterator[None]:
    """Call `read` with (key, module, inputs, output) after each call of a module inside the context.

    Args:
        layers: pairs (key, module).
        read: gets the first positional argument of the call as the inputs.
        keyword: name of the inputs in a call without positional arguments.
        prepend: read before other hooks, which may change the output.
    """

    def hook(key: Key, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        read(key, module, given[0] if given else named[keyword], output)

    handles = (
        module.register_forward_hook(partial(hook, key), prepend=prepend, with_kwargs=True) for key, module in layers
    )
    with hooked(handles):
        yield


@contextmanager
def network(
    model: nn.Module,
    masks: Masks | None,
    parameters: Iterable[str] | None,
    *,
    batch_norm: BatchNormMode = "eval",
    value: Callable[[nn.Module, str, Tensor], Tensor] | None = None,
) -> Iterator[Network]:
    """Copy `model` for a score; inside the context gradients are on, and the global generators are restored at its end.

    Args:
        model: left unchanged.
        masks: see `weights_of`.
        parameters: see `weights_of`.
        batch_norm: "train" normalises by the statistics of each batch, "eval" by the running statistics.
        value: (module, leaf, v) -> values that replace v in the copy, called for every parameter; None keeps v.

    Raises:
        ValueError: see `weights_of`; or `batch_norm` is neither word; or a tensor of `model` is on the meta device.
    """
    if batch_norm not in get_args(BatchNormMode):
        raise ValueError(f"`batch_norm` (={batch_norm!r}) must be 'train' or 'eval'.")
    check_all_have_values(model)
    kept = _kept(model, masks or {})
    weights = _weights(model, kept, parameters)
    for name, weight in weights.items():
        check_prunable(name, weight.parameter, reader="scores and repairs that run the network")
    devices = {parameter.device.index or 0 for parameter in model.parameters() if parameter.is_cuda}
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(sorted(devices)), torch.enable_grad():
        plain, parameters_of = _plain_copy(model, kept, value)
        _set_modes(plain, batch_norm)
        named = {name: parameters_of[id(weight.parameter)] for name, weight in weights.items()}
        for parameter in named.values():
            parameter.requires_grad_()
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # the fast path skips the layers, and so their hooks
            yield Network(plain, weights, named)
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _plain_copy(
    model: nn.Module, kept: Mapping[int, Tensor], value: Callable[[nn.Module, str, Tensor], Tensor] | None
) -> tuple[nn.Module, dict[int, nn.Parameter]]:
    """Return a plain copy of a model, and id of a parameter -> the frozen parameter of the copy."""
    memo = values_with_history(model)
    parameters: dict[int, nn.Parameter] = {}
    for _, module, leaf, parameter in plain_weights(model):
        if id(parameter) not in parameters:
            values = parameter.detach()
            values = masked(values, kept[id(parameter)]) if id(parameter) in kept else values
            values = values if value is None else value(module, leaf, values)
            memo[id(parameter)] = parameters[id(parameter)] = nn.Parameter(values, requires_grad=False)
    plain = copied(unwrapped(model), memo)
    for module in plain.modules():
        for leaf in pruned_names(module):
            ModuleParameter.of(module, leaf).release()
        drop_vacated(module)
    route_among_survivors(plain)
    return plain, parameters


def _set_modes(model: nn.Module, batch_norm: BatchNormMode) -> None:
    model.eval()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.train(batch_norm == "train")
        elif isinstance(module, nn.RNNBase):  # cuDNN computes gradients of RNNs in training mode only
            module.train()
            module.dropout = 0.0


def in_single_precision(model: nn.Module) -> None:
    """Make a copied 16-bit network compute in float32, also on 16-bit inputs; leave other networks unchanged."""
    narrow = (torch.float16, torch.bfloat16)
    if not any(parameter.dtype in narrow for parameter in model.parameters()):
        return

    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype in narrow else value

    def given(_module: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return tuple(map(widen, args)), {name: widen(value) for name, value in named.items()}

    model.float()
    model.register_forward_pre_hook(given, with_kwargs=True)


def batch_norms(model: nn.Module) -> dict[str, nn.Module]:
    """Return qualified name -> BatchNorm layer with a scale, in the order of the model."""
    return {
        path: module
        for path, module in plain_modules(model)
        if isinstance(module, _BatchNorm) and cast(Tensor | None, module.weight) is not None
    }
