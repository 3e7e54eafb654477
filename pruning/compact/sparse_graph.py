"""The traced network with layers that run on nonzeros: kernels chosen on each layer's inputs."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from pruning.compact.fused_layers import FusedLayer, LstmCall, SparseLstm, chosen_lstm, is_worthwhile, sparse_lstm
from pruning.compact.layer_sequences import join_layers
from pruning.compact.rewriting import call_functions
from pruning.graph.operations import name_of
from pruning.kernels.dense_steps import DenseStep
from pruning.kernels.sparse_layer import KernelChoice, SparseLayer, chosen, dense_choice
from pruning.kernels.sparse_weight import ByteScale, SparseWeight

LEAST_SPARSITY = 0.2
"""Layers with fewer zeros stay dense without a measurement."""


@dataclass(frozen=True)
class LayerReport:
    """A layer of a sparse network.

    Args:
        name: its name.
        sparsity: its fraction of zeros.
        choices: the choice at each batch size.
        hands_on: whether its outputs stay bytes for the layers that read them.
        error: by how much rounding moves its outputs for exact inputs: root mean square, relative to that of the
            outputs, the largest over batch sizes; 0 for layers in float32.
    """

    name: str
    sparsity: float
    choices: tuple[KernelChoice, ...]
    error: float = 0.0
    hands_on: bool = False


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
        self.of_lstms: dict[fx.Node, list[tuple[list[KernelChoice], float]]] = {node: [] for node in self.lstms}
        self.slow_lstms: dict[fx.Node, LstmCall] = {}
        self.layers = {layer.nodes[-1]: layer for layer in layers}
        self.weights = {
            node: SparseWeight.of(layer.weight)
            for node, layer in self.layers.items()
            if not all_dense and float((layer.weight == 0).double().mean()) >= LEAST_SPARSITY
        }
        self.found: dict[fx.Node, list[KernelChoice]] = {node: [] for node in self.layers}
        self.errors = dict.fromkeys(self.layers, 0.0)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; at the last one of a layer, choose."""
        layer = self.layers.get(n)
        if layer is not None:
            x, added = self.env[layer.x], None if layer.added is None else self.env[layer.added]
            if n not in self.weights:
                choice = dense_choice(layer.shape.examples(x.shape))
            else:
                choice = chosen(self.weights[n], layer.shape, layer.bias, x.clone(), added)
                if choice.rounds:
                    self.errors[n] = max(self.errors[n], rounding_error(self.weights[n], layer, choice, x, added))
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

    def lstm_choices(self, node: fx.Node) -> list[tuple[KernelChoice, ...]]:
        """Return the choices of each product of an LSTM."""
        each_size = [choices for choices, _ in self.of_lstms[node]]
        return [tuple({choice.examples: choice for choice in own}.values()) for own in zip(*each_size, strict=True)]

    def reports(self) -> tuple[LayerReport, ...]:
        """Return a report of each layer and product, in the order of the network."""
        found = []
        for node in self.graph.nodes:
            if node in self.layers:
                layer = self.layers[node]
                zeros = float((layer.weight == 0).double().mean())
                bytes_out = layer.shape.made is not None
                found.append(LayerReport(layer.name, zeros, tuple(self.found[node]), self.errors[node], bytes_out))
            if node in self.slow_lstms:
                call = self.slow_lstms[node]
                rows = [max(choice.examples for choice in choices) for choices, _ in self.of_lstms[node]]
                found.append(LayerReport(call.name, call.sparsity, tuple(map(dense_choice, rows))))
            if node in self.lstms:
                call = self.lstms[node]
                each = zip(call.names(), call.products, self.lstm_choices(node), strict=True)
                found += [LayerReport(name, weight.sparsity, choices) for name, (weight, _), choices in each]
        return tuple(found)


def rounding_error(
    weight: SparseWeight, layer: FusedLayer, choice: KernelChoice, x: Tensor, added: Tensor | None
) -> float:
    """Return by how much a kernel's outputs differ from PyTorch's, root mean square, relative to that of PyTorch's."""
    rounded = SparseLayer(layer.shape, weight, layer.bias, [choice])(x, added)
    exact = SparseLayer(layer.shape, weight, layer.bias, [dense_choice(choice.examples)])(x, added)
    return float((rounded - exact).norm() / exact.norm().clamp_min(torch.finfo().tiny))


class InputRanges(fx.Interpreter):
    """The least and the largest input of each layer, over calibration batches; zero lies between them."""

    def __init__(self, graph: fx.GraphModule, layers: Sequence[FusedLayer]) -> None:
        super().__init__(graph, garbage_collect_values=False)
        nodes = [node for layer in layers for node in (layer.x, layer.added) if node is not None]
        self.found = {node: (torch.zeros(()), torch.zeros(())) for node in nodes}

    def run_node(self, n: fx.Node) -> Any:
        """Run a node, and widen its range."""
        value = super().run_node(n)
        if n in self.found and isinstance(value, Tensor) and value.numel():
            low, high = value.float().aminmax()
            self.found[n] = torch.minimum(self.found[n][0], low), torch.maximum(self.found[n][1], high)
        return value


def byte_scales(
    graph: fx.GraphModule, layers: Sequence[FusedLayer], batches: Sequence[Sequence[Any]]
) -> dict[fx.Node, ByteScale]:
    """Return a scale for each node that layers read: byte 0 is its least value in the batches, and 255 its largest.

    Args:
        graph: the traced network.
        layers: its layers.
        batches: inputs of the network, each as its leaves.

    Raises:
        ValueError: values are NaN or infinite.
    """
    ranges = InputRanges(graph, layers)
    with torch.inference_mode():
        for leaves in batches:
            ranges.run(*leaves, enable_io_processing=False)
    found = {}
    for node, (low, high) in ((node, map(float, each)) for node, each in ranges.found.items()):
        if not math.isfinite(high - low):
            name = next(layer.name for layer in layers if node in (layer.x, layer.added))
            raise ValueError(
                f"inputs of the layer {name} (from {low} to {high}) must be finite in all `batches`; pass inputs "
                "that the network was trained for, and a network whose weights are finite."
            )
        scale = (high - low) / 255 or 1.0
        found[node] = ByteScale(scale, round(-low / scale))
    return found


def hand_on_bytes(choosing: KernelChoices, scales: Mapping[fx.Node, ByteScale]) -> None:
    """Let layers hand on bytes where they and all readers of their outputs round at all batch sizes."""
    makers = {
        node: layer
        for node, layer in choosing.layers.items()
        if choosing.found[node] and all(choice.rounds for choice in choosing.found[node])
    }
    readers = {node: [each for each in makers.values() if node in (each.x, each.added)] for node in makers}
    passed = {
        node
        for node, maker in makers.items()
        if node in scales
        and {user for each in readers[node] for user in each.nodes} >= set(node.users)
        and all(_takes_bytes(each, maker) for each in readers[node])
    }
    for node, layer in makers.items():
        added, made = (scales[each] if each is not None and each in passed else None for each in (layer.added, node))
        shape = replace(layer.shape, takes_bytes=layer.x in passed, added=added, made=made)
        choosing.layers[node] = replace(layer, shape=shape)


def _takes_bytes(reader: FusedLayer, maker: FusedLayer) -> bool:
    """Return whether kernels read four outputs of one layer in an element: linear ones as inputs, and of one group."""
    one, other = reader.shape, maker.shape
    fits = one.groups == 1 or (reader.x is not maker.nodes[-1]) or one.inputs // one.groups % 4 == 0
    adds = one.kind == "convolution" or reader.added is not maker.nodes[-1]
    return (one.kind, one.flat) == (other.kind, other.flat) and fits and adds


def sparse_graph(graph: fx.GraphModule, choosing: KernelChoices) -> fx.GraphModule:
    """Replace the operations of each layer and each LSTM by a module."""
    names = _names(graph)
    for layer in choosing.layers.values():
        given = [layer.nodes[0].args[1 if name_of(layer.nodes[0]) == "addmm" else 0]]
        if layer.added is not None:
            before, addition = layer.nodes[layer.added_at - 1], layer.nodes[layer.added_at]
            given += [each for each in addition.args[:2] if each is not before]
        weight = SparseWeight.of(layer.weight)
        module = SparseLayer(layer.shape, weight, layer.bias, choosing.found[layer.nodes[-1]])
        _replace(graph, layer.nodes, _free_name(layer.name, names), module, given)
    for node, lstm in choosing.lstms.items():
        whole = sparse_lstm(lstm, choosing.lstm_choices(node))
        _replace(graph, [node], _free_name(lstm.name, names), whole, lstm.given)
    graph.graph.eliminate_dead_code()
    join_layers(graph)
    call_functions(graph.graph)
    _drop_unread(graph)
    graph.recompile()
    return graph


def _replace(
    graph: fx.GraphModule, nodes: Sequence[fx.Node], name: str, module: nn.Module, given: Sequence[Any]
) -> None:
    """Replace consecutive operations by a call of a module."""
    graph.add_submodule(name, module)
    with graph.graph.inserting_before(nodes[-1]):
        call = graph.graph.call_module(name, tuple(given))
    call.meta = dict(nodes[-1].meta)
    nodes[-1].replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.graph.erase_node(node)


def _names(graph: fx.GraphModule) -> set[str]:
    return {name for module in graph.modules() for name in (*module._modules, *module._parameters, *module._buffers)}


def hold_tensors(graph: fx.GraphModule) -> dict[str, str]:
    """Let the network itself hold the tensors that its operations read; return their new and old names."""
    found, names = {}, _names(graph)
    for node in graph.graph.find_nodes(op="get_attr"):
        old, value = str(node.target), attrgetter(str(node.target))(graph)
        if "." in old:
            node.target = _free_name(old, names, "tensor_")
            register = graph.register_parameter if isinstance(value, nn.Parameter) else graph.register_buffer
            register(node.target, value)
            found[node.target] = old
    _drop_unread(graph)
    graph.recompile()
    return found


def _free_name(name: str, taken: set[str], prefix: str = "sparse_") -> str:
    """Return a name for what a path leads to, and take it: prefix and path, numbered if another has this name.

    The network itself holds all layers and tensors, because each step of a path costs half a microsecond in a call.
    """
    base = f"{prefix}{re.sub('[^A-Za-z0-9_]', '_', name)}"
    found = next(name for name in chain([base], (f"{base}_{number}" for number in count(2))) if name not in taken)
    taken.add(found)
    return found


def _drop_unread(graph: fx.GraphModule) -> None:
    """Delete the parameters, buffers and empty modules that the graph no longer reads."""
    read = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    for path, module in list(graph.named_modules()):
        if isinstance(module, SparseLayer | SparseLstm | DenseStep):
            continue
        for store in (module._parameters, module._buffers):
            for leaf in list(store):
                if (f"{path}.{leaf}" if path else leaf) not in read:
                    del store[leaf]
    for path, module in reversed(list(graph.named_modules())):
        held = (*module.children(), *module.parameters(recurse=False), *module.buffers(recurse=False))
        if path and not isinstance(module, SparseLayer | DenseStep) and not held:
            parent, _, leaf = path.rpartition(".")
            graph.get_submodule(parent)._modules.pop(leaf)
