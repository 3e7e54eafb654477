"""Linear layers and convolutions of a traced network, each with the operations that its kernel computes as well.

A following batch normalisation is folded into weight and bias; an addition, and a ReLU or clamp, are computed with the
layer: y = clamp(W x + b + added, low, high).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from pruning.graph.tracing import Traced, arguments, name_of
from pruning.kernels.sparse_weight import LayerShape


@dataclass(frozen=True)
class FusedLayer:
    """A layer, as its kernel sees it.

    Args:
        name: the name of its weight, without `.weight` at the end.
        nodes: its operations in the graph, in order; the last one's value is the layer's output.
        x: the node of its inputs.
        added: the node that is added before the clamp, or None.
        added_at: place of the addition among `nodes`.
        shape: its numbers.
        weight: float32, (outputs, inputs, *kernel).
        bias: float32, (outputs,).
    """

    name: str
    nodes: tuple[fx.Node, ...]
    x: fx.Node
    added: fx.Node | None
    shape: LayerShape
    weight: Tensor
    bias: Tensor
    added_at: int = 0


def fused_layers(trace: Traced) -> Iterator[FusedLayer]:
    """Yield the layers of a network that kernels can compute, in the order of the graph."""
    order = {node: place for place, node in enumerate(trace.graph.graph.nodes)}
    taken: set[fx.Node] = set()
    for node in trace.graph.graph.nodes:
        layer = _linear(trace, node) if name_of(node) in ("linear", "addmm") else _convolution(trace, node)
        if layer is None:
            continue
        layer = _with_norm(trace, layer)
        if layer.shape.kind == "convolution":
            layer = _with_addition(layer, order, taken)
        layer = _with_clamp(layer)
        taken.update(layer.nodes)
        yield layer


def _constant(trace: Traced, node: Any) -> Tensor | None:
    """Return a float32 parameter or buffer of the network; None for anything else."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    value = trace.tensor(str(node.target))
    return value.detach() if isinstance(value, Tensor) and value.dtype is torch.float32 else None


def _bias(trace: Traced, node: Any, outputs: int) -> Tensor | None:
    """Return the bias, zeros if there is none; None if it is no constant."""
    return torch.zeros(outputs) if node is None else _constant(trace, node)


def _name(weight: fx.Node) -> str:
    return str(weight.target).removesuffix(".weight")


def _linear(trace: Traced, node: fx.Node) -> FusedLayer | None:
    given = arguments(node)
    if name_of(node) == "linear":
        x, kept, bias = given["input"], given["weight"], given["bias"]
        weight = _constant(trace, kept)
    else:
        x, kept, bias = given["mat1"], given["mat2"], given["self"]
        weight = _constant(trace, kept)
        weight = None if weight is None or (given["beta"], given["alpha"]) != (1, 1) else weight.t()
    if weight is None or weight.ndim != 2 or not weight.numel() or not isinstance(x, fx.Node):
        return None
    added = _bias(trace, bias, len(weight))
    if added is None or added.shape != weight.shape[:1]:
        return None
    shape = LayerShape("linear", weight.shape[1], weight.shape[0])
    return FusedLayer(_name(kept), (node,), x, None, shape, weight, added)


def _convolution(trace: Traced, node: fx.Node) -> FusedLayer | None:
    if name_of(node) not in ("conv1d", "conv2d"):
        return None
    given = arguments(node)
    weight, flat = _constant(trace, given["weight"]), name_of(node) == "conv1d"
    x = given["input"]
    if weight is None or not weight.numel() or not isinstance(x, fx.Node) or _dimensions(x) != weight.ndim:
        return None
    bias = _bias(trace, given["bias"], len(weight))
    stride, dilation = _pair(given["stride"], flat, 1), _pair(given["dilation"], flat, 1)
    kernel = (1, weight.shape[2]) if flat else (weight.shape[2], weight.shape[3])
    padding = _padding(given["padding"], flat, kernel, dilation)
    if bias is None or padding is None:
        return None
    groups = int(given["groups"])
    shape = LayerShape(
        "convolution", weight.shape[1] * groups, len(weight), flat, kernel, stride, padding, dilation, groups
    )
    return FusedLayer(_name(given["weight"]), (node,), x, None, shape, weight, bias)


def _dimensions(node: fx.Node) -> int | None:
    value = node.meta.get("val")
    return value.ndim if isinstance(value, Tensor) else None


def _pair(given: Any, flat: bool, filled: int) -> tuple[int, int]:
    """Return a number of a convolution down and right, from one number or one for each dimension."""
    values = list(given) if isinstance(given, list | tuple) else [given]
    if flat:
        return filled, int(values[-1])
    return int(values[0]), int(values[-1])


def _padding(
    given: Any, flat: bool, kernel: tuple[int, int], dilation: tuple[int, int]
) -> tuple[int, int, int, int] | None:
    """Return the padding (top, left, bottom, right); None if it is unknown."""
    if isinstance(given, str):
        if given not in ("same", "valid"):
            return None
        whole = [step * (size - 1) if given == "same" else 0 for step, size in zip(dilation, kernel, strict=True)]
        return whole[0] // 2, whole[1] // 2, whole[0] - whole[0] // 2, whole[1] - whole[1] // 2
    down, right = _pair(given, flat, 0)
    return down, right, down, right


def _next(layer: FusedLayer, *names: str) -> fx.Node | None:
    """Return the only reader of a layer's output, if it is one of these operations."""
    users = list(layer.nodes[-1].users)
    return users[0] if len(users) == 1 and name_of(users[0]) in names else None


def _with_norm(trace: Traced, layer: FusedLayer) -> FusedLayer:
    """Fold the batch normalisation that follows, with its statistics of training."""
    node = _next(layer, "batch_norm", "_native_batch_norm_legit_no_training")
    given = {} if node is None else arguments(node)
    if node is None or given["input"] is not layer.nodes[-1] or given.get("training"):
        return layer
    if layer.shape.kind == "linear" and _dimensions(layer.nodes[-1]) != 2:
        return layer  # the channels of the normalisation are not the outputs
    nodes = _with_first(node)
    if nodes is None:
        return layer
    outputs = layer.shape.outputs
    mean, variance = (_constant(trace, given[name]) for name in ("running_mean", "running_var"))
    scale = torch.ones(outputs) if given["weight"] is None else _constant(trace, given["weight"])
    shift = _bias(trace, given["bias"], outputs)
    if mean is None or variance is None or scale is None or shift is None:
        return layer
    factor = scale.double() / (variance.double() + given["eps"]).sqrt()
    weight = layer.weight.double() * factor.view(-1, *[1] * (layer.weight.ndim - 1))
    bias = (layer.bias.double() - mean.double()) * factor + shift.double()
    return replace(layer, nodes=(*layer.nodes, *nodes), weight=weight.float(), bias=bias.float())


def _with_first(norm: fx.Node) -> tuple[fx.Node, ...] | None:
    """Return a normalisation, and the node that takes its output if it returns a tuple; None if more is taken."""
    if name_of(norm) == "batch_norm":
        return (norm,)
    users = list(norm.users)
    return (norm, users[0]) if [(user.target, user.args[1:]) for user in users] == [(getitem, (0,))] else None


def _with_addition(layer: FusedLayer, order: dict[fx.Node, int], taken: set[fx.Node]) -> FusedLayer:
    """Take in the addition of another tensor of the output's shape that follows, such as a shortcut."""
    node = _next(layer, "add")
    if node is None or node in taken or arguments(node).get("alpha", 1) != 1:
        return layer
    given = arguments(node)
    other = given["other"] if given["self"] is layer.nodes[-1] else given["self"]
    if not isinstance(other, fx.Node) or other is layer.nodes[-1] or order[other] > order[node]:
        return layer
    own, more = layer.nodes[-1].meta.get("val"), other.meta.get("val")
    if not isinstance(own, Tensor) or not isinstance(more, Tensor) or own.dtype is not more.dtype:
        return layer
    if own.ndim != more.ndim or any(str(a) != str(b) for a, b in zip(own.shape, more.shape, strict=True)):
        return layer
    return replace(layer, nodes=(*layer.nodes, node), added=other, added_at=len(layer.nodes))


def _with_clamp(layer: FusedLayer) -> FusedLayer:
    """Take in the ReLU or the clamp that follows."""
    node = _next(layer, "relu", "hardtanh", "clamp", "clamp_min", "relu6")
    if node is None:
        return layer
    given = arguments(node)
    low, high = {"relu": (0.0, math.inf), "relu6": (0.0, 6.0)}.get(
        name_of(node), (given.get("min_val", given.get("min")), given.get("max_val", given.get("max")))
    )
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    if not all(isinstance(each, int | float) for each in (low, high)):
        return layer
    shape = replace(layer.shape, low=float(low), high=float(high))
    return replace(layer, nodes=(*layer.nodes, node), shape=shape)
