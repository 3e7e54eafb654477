"""Layers of a traced network that can run on their nonzeros: linear layers, convolutions and LSTMs.

A following batch normalisation is folded into weight and bias; an addition, and a ReLU or clamp, are computed with the
layer: y = clamp(W x + b + added, low, high).

The products of inputs and of hidden states of an LSTM are layers of their own. For each layer and direction, with the
gates i, f, o, g in this order:

    gates_t = W_ih x_t + b + W_hh h_(t-1);  c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g);  h_t = sigmoid(o) tanh(c_t)

The products of all inputs are one call; those of hidden states are one call for each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx, nn

from pruning.graph.operations import arguments, in_module, name_of
from pruning.graph.tracing import Traced
from pruning.kernels.sparse_layer import WORTHWHILE, KernelChoice, SparseLayer, chosen, fastest_seconds
from pruning.kernels.sparse_weight import LayerShape, SparseWeight


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
        layer = _with_clamp(_with_addition(_with_norm(trace, layer), order, taken))
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


TURNS = 5
"""Timed turns of an LSTM and PyTorch's own."""


@dataclass(frozen=True)
class LstmCall:
    """An LSTM in a traced network: its path, its node, and PyTorch's weights.

    `products` are the weight and bias of each product of inputs and of hidden states, cell by cell: float32,
    (4 * hidden, inputs or hidden) and (4 * hidden,), gates in the order i, f, o, g. The first of a cell has both biases
    of PyTorch's LSTM together.
    """

    name: str
    node: fx.Node
    weights: tuple[Tensor, ...]
    products: tuple[tuple[SparseWeight, Tensor], ...]
    directions: int
    batch_first: bool

    @property
    def sparsity(self) -> float:
        """Fraction of zeros in all weights."""
        matrices = [each for each in self.weights if each.ndim == 2]
        return sum(int((each == 0).sum()) for each in matrices) / sum(each.numel() for each in matrices)

    @property
    def given(self) -> tuple[fx.Node, fx.Node, fx.Node]:
        """Nodes of the inputs, the first hidden states and the first cell states."""
        said = arguments(self.node)
        return said["input"], *said["hx"]

    def names(self) -> list[str]:
        """Return the name of each product: inputs and hidden states of each cell."""
        cells = range(len(self.products) // 2)
        return [f"{self.name}.{kind}_{place}" for place in cells for kind in ("input", "hidden")]


def lstm_calls(trace: Traced) -> Iterator[LstmCall]:
    """Yield the LSTMs of a network that can run on their nonzeros: without projections, for batches, in evaluation."""
    for node in trace.graph.graph.nodes:
        if name_of(node) != "lstm" or "batch_sizes" in (given := arguments(node)):
            continue
        tensors = [trace.tensor(str(each.target)) for each in given["params"] if each.op == "get_attr"]
        count, value = 4 if given["has_biases"] else 2, given["input"].meta.get("val")
        if len(tensors) != len(given["params"]) or any(each.dtype is not torch.float32 for each in tensors):
            continue
        directions = 2 if given["bidirectional"] else 1
        if len(tensors) != count * given["num_layers"] * directions or not isinstance(value, Tensor) or value.ndim != 3:
            continue
        cells = [_products(tensors[start : start + count]) for start in range(0, len(tensors), count)]
        products, name = tuple(each for cell in cells for each in cell), in_module(node) or node.name
        yield LstmCall(name, node, tuple(tensors), products, directions, bool(given["batch_first"]))


def _products(tensors: Sequence[Tensor]) -> list[tuple[SparseWeight, Tensor]]:
    """Return weight and bias of a cell's two products; the bias of hidden states is zero."""
    inputs, hidden, *biases = (_reordered(each.detach()) for each in tensors)
    bias = biases[0] + biases[1] if biases else torch.zeros(len(inputs))
    return [(SparseWeight.of(inputs), bias), (SparseWeight.of(hidden), torch.zeros_like(bias))]


def _reordered(tensor: Tensor) -> Tensor:
    """Return the rows of PyTorch's order i, f, g, o in the order i, f, o, g."""
    i, f, g, o = tensor.chunk(4)
    return torch.cat([i, f, o, g])


class SparseLstm(nn.Module):
    """An LSTM whose products run on their nonzero weights.

    Args:
        products: the layers of inputs and hidden states, cell by cell; a layer's directions follow each other.
        directions: 1, or 2 for a bidirectional LSTM.
        batch_first: whether the batch is the first dimension of inputs and outputs.
    """

    def __init__(self, products: Sequence[SparseLayer], directions: int, batch_first: bool) -> None:
        super().__init__()
        self.products = nn.ModuleList(products)
        self.directions, self.batch_first = directions, batch_first

    def forward(self, x: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the outputs, the last hidden states and the last cell states, as PyTorch's LSTM does."""
        x = x.transpose(0, 1) if self.batch_first else x
        last_hidden, last_state = [], []
        for layer in range(0, len(self.products) // 2, self.directions):
            outputs = []
            for direction in range(self.directions):
                place = layer + direction
                found, h, c = self._run(place, x, hidden[place], state[place], backward=bool(direction))
                outputs.append(found)
                last_hidden.append(h)
                last_state.append(c)
            x = torch.cat(outputs, 2) if self.directions == 2 else outputs[0]
        x = x.transpose(0, 1) if self.batch_first else x
        return x, torch.stack(last_hidden), torch.stack(last_state)

    def _run(self, place: int, x: Tensor, h: Tensor, c: Tensor, *, backward: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Run a cell over all steps; return its outputs and its last states."""
        of_inputs, of_hidden, size = self.products[2 * place](x), self.products[2 * place + 1], h.shape[1]
        found: list[Tensor] = []
        for gates in reversed(of_inputs.unbind()) if backward else of_inputs.unbind():
            gates = of_hidden(h, gates)
            i, f, o = gates[:, : 3 * size].sigmoid().chunk(3, 1)
            c = torch.addcmul(f * c, i, gates[:, 3 * size :].tanh())
            h = o * c.tanh()
            found.append(h)
        return torch.stack(found[::-1] if backward else found), h, c


def sparse_lstm(call: LstmCall, choices: Sequence[Sequence[KernelChoice]]) -> SparseLstm:
    """Return the module of an LSTM, from the choices of each of its products."""
    pairs = zip(call.products, choices, strict=True)
    products = [SparseLayer(_shape(weight), weight, bias, own) for (weight, bias), own in pairs]
    return SparseLstm(products, call.directions, call.batch_first)


def chosen_lstm(call: LstmCall, x: Tensor, hidden: Tensor, state: Tensor) -> tuple[list[KernelChoice], float]:
    """Return the fastest kernels of an LSTM's products for some inputs, and its speed-up over PyTorch's LSTM.

    Args:
        call: the LSTM.
        x: its inputs.
        hidden, state: its first states, shape (layers * directions, batch, hidden).
    """
    steps, batch = (x.shape[1], x.shape[0]) if call.batch_first else x.shape[:2]
    found = []
    for place, (weight, bias) in enumerate(call.products):
        if place % 2:
            found.append(chosen(weight, _shape(weight), bias, hidden[0], torch.randn(batch, weight.shape[0])))
        else:
            found.append(chosen(weight, _shape(weight), bias, torch.randn(steps, batch, weight.shape[1]), None))
    module = sparse_lstm(call, [[each] for each in found])
    said = arguments(call.node)
    numbers = [said[name] for name in ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")]
    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: torch.lstm(x, (hidden, state), call.weights, *numbers),
        "sparse": lambda: module(x, hidden, state),
    }
    with torch.inference_mode():
        seconds = fastest_seconds(calls, TURNS, 0.0)
    return found, seconds["torch"] / seconds["sparse"]


def is_worthwhile(speedups: Sequence[float]) -> bool:
    """Return whether an LSTM is faster on its nonzeros at each batch size."""
    return min(speedups, default=0.0) >= 1 / WORTHWHILE


def _shape(weight: SparseWeight) -> LayerShape:
    return LayerShape("linear", weight.row, weight.shape[0])
