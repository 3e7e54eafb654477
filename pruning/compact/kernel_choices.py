"""Choice of the kernels of all layers of a traced network, on the inputs that each has there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pruning.compact.fused_layers import FusedLayer
from pruning.compact.sparse_lstm import LstmCall, chosen_lstm, is_worthwhile
from pruning.kernels.sparse_layer import Choice, chosen, dense_choice
from pruning.kernels.sparse_weight import SparseWeight

LEAST_SPARSITY = 0.2
"""Layers with fewer zeros stay dense without a measurement."""


@dataclass(frozen=True)
class LayerReport:
    """A layer of a sparse network: its name, its fraction of zeros, and the choice at each batch size."""

    name: str
    sparsity: float
    choices: tuple[Choice, ...]


class KernelChoices(fx.Interpreter):
    """Kernels of a network's layers and LSTMs, by batch size.

    Args:
        graph: the traced network.
        layers: its layers.
        lstms: its LSTMs.
        all_dense: choose PyTorch's own operation for all layers, without a measurement.
    """

    def __init__(
        self, graph: fx.GraphModule, layers: Sequence[FusedLayer], lstms: Sequence[LstmCall], *, all_dense: bool
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.lstms = {call.node: call for call in lstms if call.sparsity >= LEAST_SPARSITY}
        self.of_lstms: dict[fx.Node, list[tuple[list[Choice], float]]] = {node: [] for node in self.lstms}
        self.slow_lstms: dict[fx.Node, LstmCall] = {}
        self.layers = {layer.nodes[-1]: layer for layer in layers}
        self.weights = {
            node: SparseWeight.of(layer.weight)
            for node, layer in self.layers.items()
            if not all_dense and float((layer.weight == 0).double().mean()) >= LEAST_SPARSITY
        }
        self.found: dict[fx.Node, list[Choice]] = {node: [] for node in self.layers}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; at the last one of a layer, choose."""
        layer = self.layers.get(n)
        if layer is not None:
            x, added = self.env[layer.x], None if layer.added is None else self.env[layer.added]
            if n not in self.weights:
                choice = dense_choice(layer.shape.examples(x.shape))
            else:
                choice = chosen(self.weights[n], layer.shape, layer.bias, x.clone(), added)
            if choice.examples not in [each.examples for each in self.found[n]]:
                self.found[n].append(choice)
        elif n in self.lstms:
            self.of_lstms[n].append(
                chosen_lstm(self.lstms[n], *(self.env[each].clone() for each in self.lstms[n].given))
            )
        return super().run_node(n)

    def measure(self, inputs: Sequence[Sequence[Any]]) -> None:
        """Choose the kernels for several inputs, each as its leaves, and leave out the LSTMs that are not faster."""
        with torch.inference_mode():
            for leaves in inputs:
                self.run(*leaves, enable_io_processing=False)
        self.slow_lstms = {
            node: call
            for node, call in self.lstms.items()
            if not is_worthwhile([ratio for _, ratio in self.of_lstms[node]])
        }
        self.lstms = {node: call for node, call in self.lstms.items() if node not in self.slow_lstms}

    def lstm_choices(self, node: fx.Node) -> list[tuple[Choice, ...]]:
        """Return the choices of each product of an LSTM."""
        each_size = [choices for choices, _ in self.of_lstms[node]]
        return [tuple({choice.examples: choice for choice in own}.values()) for own in zip(*each_size, strict=True)]

    def reports(self) -> tuple[LayerReport, ...]:
        """Return a report of each layer and product, in the order of the network."""
        found = []
        for node in self.graph.nodes:
            if node in self.layers:
                layer = self.layers[node]
                found.append(
                    LayerReport(layer.name, float((layer.weight == 0).double().mean()), tuple(self.found[node]))
                )
            if node in self.slow_lstms:
                call = self.slow_lstms[node]
                rows = [max(choice.examples for choice in choices) for choices, _ in self.of_lstms[node]]
                found.append(LayerReport(call.name, call.sparsity, tuple(map(dense_choice, rows))))
            if node in self.lstms:
                call = self.lstms[node]
                each = zip(call.names(), call.nonzeros(), self.lstm_choices(node), strict=True)
                found += [LayerReport(name, weight.sparsity, choices) for name, weight, choices in each]
        return tuple(found)
