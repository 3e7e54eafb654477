"""BatchNorms that follow layers, found by tracing the network."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from pruning.scores.readings.network import network

_KEEPING_CHANNELS = frozenset(
    {
        *("relu", "relu6", "leaky_relu", "elu", "selu", "gelu", "silu", "mish", "softplus", "hardswish", "hardtanh"),
        *("tanh", "sigmoid", "hardsigmoid", "dropout", "contiguous", "clone"),
        *(f"{kind}_pool{dims}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for dims in (1, 2, 3)),
    }
)
"""Functions and methods that keep every channel at its position."""


def batch_norms_after(model: nn.Module) -> dict[str, str]:
    """Return name of a layer's weight -> name of the scale of the BatchNorm that reads the layer's output.

    Activations, dropout and pooling may come between the two. A layer is left out if no BatchNorm follows it, if it or
    its BatchNorm is called more than once, or if its channels are mixed with others before the BatchNorm.

    Raises:
        ValueError: `torch.fx` cannot trace the forward of `model`.
    """
    with network(model, None, None) as net:
        modules = dict(net.model.named_modules())
        try:
            graph = _Layers().trace(net.model)
        except Exception as error:
            raise ValueError(
                f"`model` ({type(model).__name__}) cannot be traced by torch.fx ({str(error).splitlines()[0]}), which "
                "finds the BatchNorm after each layer; remove branches on inputs from its forward, or choose a score "
                "that does not read BatchNorm."
            ) from error
    calls = Counter(id(modules[str(node.target)]) for node in graph.nodes if node.op == "call_module")
    found: dict[str, str] = {}
    for node in graph.nodes:
        norm = modules[str(node.target)] if node.op == "call_module" else None
        source = _source(node.all_input_nodes, modules) if isinstance(norm, _BatchNorm) and norm.affine else None
        if norm is None or source is None or any(calls[id(each)] > 1 for each in (norm, modules[source])):
            continue
        layer: Any = modules[source]
        if (layer.out_channels if isinstance(layer, _ConvNd) else layer.out_features) != norm.num_features:
            continue
        found.setdefault(_weight(source), _weight(str(node.target)))
    return {name: found[name] for name in map(_weight, modules) if name in found}


class _Layers(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Linear | _ConvNd | _BatchNorm) or super().is_leaf_module(m, module_qualified_name)


def _source(read: list[fx.Node], modules: dict[str, nn.Module]) -> str | None:
    """Return the name of the one layer whose channels these nodes carry; None if there is none, or several."""
    while len(read) == 1:
        node = read[0]
        module: Any = modules[str(node.target)] if node.op == "call_module" else None
        if isinstance(module, nn.Linear | _ConvNd):
            return str(node.target)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        kind = "" if module is None else type(module).__module__
        keeps = isinstance(module, nn.Identity) or kind.endswith((".activation", ".dropout", ".pooling"))
        if not keeps and (module is not None or name.rstrip("_") not in _KEEPING_CHANNELS):
            return None
        read = node.all_input_nodes
    return None


def _weight(path: str) -> str:
    return f"{path}.weight" if path else "weight"
