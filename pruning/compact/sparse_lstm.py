"""LSTMs on their nonzero weights: the products of inputs and of hidden states are layers of their own.

For each layer and direction, with the gates i, f, o, g in this order:

    gates_t = W_ih x_t + b + W_hh h_(t-1);  c_t = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g);  h_t = sigmoid(o) tanh(c_t)

The products of all inputs are one call; those of hidden states are one call for each step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from pruning.graph.tracing import Traced, arguments, in_module, name_of
from pruning.kernels.sparse_layer import WORTHWHILE, KernelChoice, SparseLayer, chosen
from pruning.kernels.sparse_weight import LayerShape, SparseWeight

TURNS = 5
"""Timed turns of an LSTM and PyTorch's own."""


@dataclass(frozen=True)
class Cell:
    """The weights of a layer in one direction, gates in the order i, f, o, g.

    Args:
        inputs: float32, (4 * hidden, inputs).
        hidden: float32, (4 * hidden, hidden).
        bias: float32, (4 * hidden,), both biases of PyTorch's LSTM together.
    """

    inputs: Tensor
    hidden: Tensor
    bias: Tensor


@dataclass(frozen=True)
class LstmCall:
    """An LSTM in a traced network: its path, its node, PyTorch's weights, and its cells, layer by layer."""

    name: str
    node: fx.Node
    weights: tuple[Tensor, ...]
    cells: tuple[Cell, ...]
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
        return [f"{self.name}.{kind}_{place}" for place in range(len(self.cells)) for kind in ("input", "hidden")]

    def nonzeros(self) -> list[SparseWeight]:
        """Return the nonzeros of each product's weight."""
        return [SparseWeight.of(each) for cell in self.cells for each in (cell.inputs, cell.hidden)]


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
        cells = tuple(_cell(tensors[start : start + count]) for start in range(0, len(tensors), count))
        yield LstmCall(
            in_module(node) or node.name, node, tuple(tensors), cells, directions, bool(given["batch_first"])
        )


def _cell(tensors: Sequence[Tensor]) -> Cell:
    inputs, hidden, *biases = (_reordered(each.detach()) for each in tensors)
    return Cell(inputs, hidden, biases[0] + biases[1] if biases else torch.zeros(len(inputs)))


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
    products = [
        SparseLayer(_shape(weight), weight, bias, own)
        for weight, bias, own in zip(call.nonzeros(), _biases(call), choices, strict=True)
    ]
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
    for place, (weight, bias) in enumerate(zip(call.nonzeros(), _biases(call), strict=True)):
        if place % 2:
            found.append(chosen(weight, _shape(weight), bias, hidden[0], torch.randn(batch, weight.shape[0])))
        else:
            found.append(chosen(weight, _shape(weight), bias, torch.randn(steps, batch, weight.shape[1]), None))
    module = sparse_lstm(call, [[each] for each in found])
    said = arguments(call.node)
    numbers = [said[name] for name in ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")]
    before, after = [], []
    with torch.inference_mode():
        for _ in range(TURNS):
            start = time.perf_counter()
            torch.lstm(x, (hidden, state), call.weights, *numbers)
            between = time.perf_counter()
            module(x, hidden, state)
            before.append(between - start)
            after.append(time.perf_counter() - between)
    return found, min(before) / min(after)


def is_worthwhile(speedups: Sequence[float]) -> bool:
    """Return whether an LSTM is faster on its nonzeros at each batch size."""
    return min(speedups, default=0.0) >= 1 / WORTHWHILE


def _shape(weight: SparseWeight) -> LayerShape:
    return LayerShape("linear", weight.row, weight.shape[0])


def _biases(call: LstmCall) -> list[Tensor]:
    """Return the bias of each product; that of hidden states is zero."""
    return [each for cell in call.cells for each in (cell.bias, torch.zeros_like(cell.bias))]
