"""`pruning.to_sparse`: a network for inference whose layers run on their nonzero weights where that is faster."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from pruning.compact.fused_layers import FusedLayer, fused_layers
from pruning.compact.rewriting import call_functions
from pruning.compact.shrinking import shrink
from pruning.compact.sparse_lstm import LstmCall, SparseLstm, chosen_lstm, is_worthwhile, lstm_calls, sparse_lstm
from pruning.graph.operations import arguments, name_of
from pruning.graph.tracing import Example, arguments_of, is_in_place, plain_copy, quiet, traced
from pruning.kernels.choosing import chosen, dense_choice
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.library import library
from pruning.kernels.sparse_layer import Choice, SparseLayer
from pruning.kernels.sparse_weight import SparseWeight

TOLERANCE = 1e-4
"""Largest allowed difference of outputs, relative to the largest output."""
LEAST_SPARSITY = 0.2
"""Layers with fewer zeros stay dense without a measurement."""
TURNS, TURN = 9, 2e-3
"""Timed turns of the whole network, and the least seconds of each."""
NOISE = 0.97
"""The dense network is returned if the sparse one's speed-up is below this at any batch size."""


LAYERS = "sparse_layers"
"""Module of a sparse network that holds its layers."""


@dataclass(frozen=True)
class LayerReport:
    """A layer of a sparse network: its name, its fraction of zeros, and the choice at each batch size."""

    name: str
    sparsity: float
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Sparse:
    """Report of `to_sparse`, as plain data; `str` formats it as a table.

    Args:
        layers: the layers, in the order of the network.
        speedups: batch size -> speed-up of the network over the given one in PyTorch.
        threads: torch's number of threads in the measurements.
        error: largest difference from the given network's outputs, relative to the largest output.
        reason: why the network is an unchanged copy, or why all layers are dense; empty if neither is so.
    """

    layers: tuple[LayerReport, ...]
    speedups: Mapping[int, float]
    threads: int
    error: float
    reason: str = ""

    def __str__(self) -> str:
        rows = [("layer", "sparsity", "rows", "kernel", "speed-up")]
        for layer in self.layers:
            for choice in layer.choices:
                kernel = " ".join([choice.kernel, *(f"{name}={value}" for name, value in choice.setting.items())])
                cells = (f"{100 * layer.sparsity:.1f}%", str(choice.examples), kernel, f"{choice.speedup:.2f}x")
                rows.append((layer.name, *cells))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        whole = ", ".join(f"{ratio:.2f}x at batch {size}" for size, ratio in self.speedups.items())
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        lines += [f"whole network: {whole or 'not measured'}; {threads}; outputs differ by {self.error:.1e}"]
        return "\n".join([*lines, *[self.reason] * bool(self.reason)])

    def report(self) -> str:
        """Return the table."""
        return str(self)


def to_sparse(model: nn.Module, example: Example, *, examples: Sequence[Example] = ()) -> nn.Module:
    """Return a network for inference that runs on the nonzero weights of linear layers and convolutions.

        faster = pruning.to_sparse(model, images[:2], examples=[images[:1], images[:32]])
        print(faster.report())                 # layer, sparsity, kernel, speed-up

    Empty channels are removed first (`shrink`). Batch normalisations are folded into the layers before them; additions
    and ReLUs are computed with the layer that they follow. Each layer takes the fastest of the kernels in
    `pruning.catalogue.kernels.KERNELS`, among them PyTorch's own, measured here with torch's number of threads. The
    network runs in float32 on the CPU, without gradients. If it is not faster than the given one, or if its outputs
    differ by more than 1e-4 of the largest, an unchanged copy is returned, and its report says so.

    The kernels are compiled at first use by the system's C compiler; without one, all layers stay dense.

    Args:
        model: pruned or not; it is not changed. Its outputs in evaluation mode are preserved.
        example: input of the network: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        examples: inputs for whose batch sizes kernels are chosen, by default `example`; other batch sizes run on the
            kernels of the nearest one.

    Returns:
        a network in evaluation mode, with the attribute `sparse` (a `Sparse`) and the method `report()`.

    Raises:
        ValueError: `torch.export` cannot trace the model, or it runs neither in float32 nor in float64.
        TypeError: `example` is no tensor, tuple or mapping.
    """
    plain = plain_copy(model)
    inputs = [arguments_of(each) for each in (examples or (example,))]
    given = _of_two(example)
    smaller = shrink(model, given)
    trace = traced(smaller, given, any_batch=True)
    reason = _unavailable()
    layers, lstms = list(fused_layers(trace)), [] if reason else list(lstm_calls(trace))
    choosing = _Choosing(trace.graph, layers, lstms, all_dense=bool(reason))
    choosing.run_all(inputs)
    reports = choosing.reports()
    network = _replaced(trace.graph, layers, choosing)
    error = max(_difference(plain, network, each) for each in inputs)
    speedups = {_size(each): _speedup(plain, network, each) for each in inputs}
    if error > TOLERANCE:
        reason = f"unchanged copy: outputs of the sparse network differ by {error:.2g} of the largest"
    elif slow := [size for size, ratio in speedups.items() if ratio < NOISE]:
        reason = f"unchanged copy: at batch {slow[0]} the sparse network is {speedups[slow[0]]:.2f} times as fast"
    unchanged = reason.startswith("unchanged")
    found = plain if unchanged else network
    sparse = Sparse(reports, speedups, torch.get_num_threads(), error, reason)
    found.sparse = sparse  # type: ignore[assignment]
    found.report = sparse.report  # type: ignore[assignment]
    return found.eval()


def _unavailable() -> str:
    """Return why no kernel runs, and warn; empty if they do."""
    try:
        library()
    except KernelsUnavailable as error:
        reason = f"all layers are dense: {error}"
        warnings.warn(f"to_sparse: {reason}", stacklevel=3)
        return reason
    return ""


def _of_two(example: Example) -> Example:
    """Repeat an example of batch size 1, which a trace would take for a constant."""
    tensors = [leaf for leaf in tree_leaves(example) if isinstance(leaf, Tensor)]
    if not tensors or any(not leaf.ndim or len(leaf) != 1 for leaf in tensors):
        return example
    doubled: Example = tree_map(lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, Tensor) else leaf, example)
    return doubled


def _size(given: tuple[tuple[Any, ...], dict[str, Any]]) -> int:
    """Return the batch size of inputs."""
    return next((len(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim), 1)


class _Choosing(fx.Interpreter):
    """Runs a network, and chooses the kernel of each layer on the inputs that it has there."""

    def __init__(
        self, graph: fx.GraphModule, layers: Sequence[FusedLayer], lstms: Sequence[LstmCall], *, all_dense: bool
    ) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.lstms = {call.node: call for call in lstms if call.sparsity >= LEAST_SPARSITY}
        self.of_lstms: dict[fx.Node, list[tuple[list[Choice], float]]] = {node: [] for node in self.lstms}
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

    def run_all(self, inputs: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> None:
        """Run the network on several inputs, and leave out the LSTMs that are not faster."""
        names = [str(node.target) for node in self.graph.find_nodes(op="placeholder")]
        with torch.inference_mode():
            for args, kwargs in inputs:
                self.run(*args, *(kwargs[name] for name in names[len(args) :]), enable_io_processing=False)
        self.lstms = {
            node: call
            for node, call in self.lstms.items()
            if is_worthwhile([ratio for _, ratio in self.of_lstms[node]])
        }

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
            if node in self.lstms:
                call = self.lstms[node]
                each = zip(call.names(), call.nonzeros(), self.lstm_choices(node), strict=True)
                found += [LayerReport(name, weight.sparsity, choices) for name, weight, choices in each]
        return tuple(found)


def _replaced(graph: fx.GraphModule, layers: Sequence[FusedLayer], choosing: _Choosing) -> fx.GraphModule:
    """Replace the operations of each layer and each LSTM by a module."""
    names: set[str] = set()
    _skip_identities(graph.graph, {layer.nodes[-1] for layer in layers})
    for layer in layers:
        last = layer.nodes[-1]
        name = _free_name(layer.name, names)
        names.add(name)
        weight = SparseWeight.of(layer.weight)
        graph.add_submodule(name, SparseLayer(layer.shape, weight, layer.bias, choosing.found[last]))
        with graph.graph.inserting_before(last):
            given = [layer.nodes[0].args[1 if name_of(layer.nodes[0]) == "addmm" else 0]]
            if layer.added is not None:
                before, addition = layer.nodes[layer.added_at - 1], layer.nodes[layer.added_at]
                given += [each for each in addition.args[:2] if each is not before]
            call = graph.graph.call_module(name, tuple(given))
        call.meta = dict(last.meta)
        last.replace_all_uses_with(call)
        for node in reversed(layer.nodes):
            graph.graph.erase_node(node)
    for node, lstm in choosing.lstms.items():
        name = _free_name(lstm.name, names)
        graph.add_submodule(name, sparse_lstm(lstm, choosing.lstm_choices(node)))
        with graph.graph.inserting_before(node):
            call = graph.graph.call_module(name, lstm.given)
        node.replace_all_uses_with(call)
        graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    call_functions(graph.graph)
    _drop_unread(graph)
    graph._tracer_cls = None  # the tracer class of torch.export cannot be pickled
    graph.recompile()
    return graph


def _skip_identities(graph: fx.Graph, kept: set[fx.Node]) -> None:
    """Remove slices of everything and padding by nothing, if no operation writes to its inputs."""
    if any(is_in_place(node) and node not in kept for node in graph.nodes if node.op == "call_function"):
        return
    for node in list(graph.nodes):
        given = arguments(node) if name_of(node) in ("slice", "pad", "constant_pad_nd") else {}
        whole = (given.get("start"), given.get("step")) in ((0, 1), (None, 1)) and (given.get("end") or 2**63) >= 2**62
        if given and (whole if "start" in given else not any(given["pad"])):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _free_name(name: str, taken: set[str]) -> str:
    """Return a name for a layer's module: `LAYERS` and its path, numbered if a module is called several times."""
    base = f"{LAYERS}.{name.replace('.', '_')}"
    found, number = base, 1
    while found in taken:
        number += 1
        found = f"{base}_{number}"
    return found


def _drop_unread(graph: fx.GraphModule) -> None:
    """Delete the parameters, buffers and empty modules that the graph no longer reads."""
    read = {str(node.target) for node in graph.graph.find_nodes(op="get_attr")}
    for path, module in list(graph.named_modules()):
        if isinstance(module, SparseLayer | SparseLstm):
            continue
        for store in (module._parameters, module._buffers):
            for leaf in list(store):
                if (f"{path}.{leaf}" if path else leaf) not in read:
                    del store[leaf]
    for path, module in reversed(list(graph.named_modules())):
        if path and not isinstance(module, SparseLayer) and not list(module.children()) and not _tensors(module):
            parent, _, leaf = path.rpartition(".")
            graph.get_submodule(parent)._modules.pop(leaf)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _outputs(model: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Tensor]:
    args, kwargs = given
    with torch.no_grad(), quiet():
        return [leaf for leaf in tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _difference(one: nn.Module, other: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> float:
    """Return the largest difference of outputs, relative to the largest."""
    worst = 0.0
    for expected, found in zip(_outputs(one, given), _outputs(other, given), strict=True):
        finite = expected.isfinite()
        if found.shape != expected.shape or not torch.equal(finite, found.isfinite()):
            return float("inf")
        if not expected.is_floating_point():
            worst = max(worst, 0.0 if torch.equal(found, expected) else float("inf"))
        elif finite.any():
            scale = expected[finite].abs().max().clamp_min(torch.finfo(expected.dtype).tiny)
            worst = max(worst, float((found[finite] - expected[finite]).abs().max() / scale))
    return worst


def _speedup(one: nn.Module, other: nn.Module, given: tuple[tuple[Any, ...], dict[str, Any]]) -> float:
    """Return the median ratio of the times of two networks, timed in turns."""
    args, kwargs = given
    ratios = []
    with torch.inference_mode(), quiet():
        calls = [functools.partial(each, *args, **kwargs) for each in (one, other)]
        counts = [max(1, round(TURN / max(_seconds(call, 2), 1e-7))) for call in calls]
        for _ in range(TURNS):
            times = [_seconds(call, count) for call, count in zip(calls, counts, strict=True)]
            ratios.append(times[0] / times[1])
    return statistics.median(ratios)


def _seconds(call: Any, count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count
