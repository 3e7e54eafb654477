"""`pruning.to_sparse`: a network for inference whose layers run on their nonzero weights where that is faster."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pruning.compact.fused_layers import fused_layers, lstm_calls
from pruning.compact.needless_operations import skip_needless
from pruning.compact.other_inputs import OtherInputs
from pruning.compact.shrinking import shrink
from pruning.compact.sparse_graph import (
    KernelChoices,
    LayerReport,
    byte_scales,
    hand_on_bytes,
    hold_tensors,
    sparse_graph,
)
from pruning.compact.traced_network import TracedNetwork
from pruning.graph.tracing import (
    Example,
    Sizes,
    Traced,
    arguments_of,
    copied,
    first_line,
    output_difference,
    outputs_of,
    plain_copy,
    quiet,
    traced,
)
from pruning.holding.copies import values_with_history
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.library import library
from pruning.kernels.sparse_layer import SparseLayer, check_conversion, fastest_seconds
from pruning.measure.macs import Inputs

TOLERANCE = 1e-4
"""Largest allowed difference of outputs, relative to the largest output."""
TURNS, TURN = 9, 2e-3
"""Timed turns of the whole network, and the least seconds of each."""
NOISE = 0.97
"""The dense network is returned if the sparse one's speed-up is below this at any batch size."""


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
        rounds = any(layer.error for layer in self.layers)
        rows = [("layer", "sparsity", "rows", "kernel", "speed-up", *["error"] * rounds)]
        for layer in self.layers:
            error = [f"{100 * layer.error:.2g}%"] * rounds
            for choice in layer.choices:
                said = [f"{name}={value}" for name, value in choice.setting.items()]
                kernel = " ".join([choice.kernel, *said, *["to bytes"] * layer.hands_on])
                cells = (f"{100 * layer.sparsity:.1f}%", str(choice.examples), kernel, f"{choice.speedup:.2f}x")
                rows.append((layer.name, *cells, *error))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        whole = ", ".join(f"{ratio:.2f}x at batch {size}" for size, ratio in self.speedups.items())
        threads = f"{self.threads} thread" + "s" * (self.threads > 1)
        lines += [f"whole network: {whole or 'not measured'}; {threads}; outputs differ by {self.error:.1e}"]
        return "\n".join([*lines, *[self.reason] * bool(self.reason)])


class SparseNetwork(TracedNetwork):
    """A traced network with sparse layers; no conversion is done by halves."""

    sparse: Sparse

    def report(self) -> str:
        """Return the table of layers."""
        return str(self.sparse)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TracedNetwork:
        if any(isinstance(layer, SparseLayer) for layer in self.modules()):
            check_conversion(fn)
        return super()._apply(fn, recurse)


def to_sparse(
    model: nn.Module,
    example: Example,
    *,
    examples: Iterable[Example] = (),
    int8: bool = False,
    batches: Iterable[Example] | None = None,
) -> nn.Module:
    """Return a network for inference that runs on the nonzero weights of linear layers and convolutions.

        faster = pruning.to_sparse(model, images[:2], examples=[images[:1], images[:32]])
        print(faster.report())                 # layer, sparsity, kernel, speed-up

    Empty channels are removed first (`shrink`). Batch normalisations are folded into the layers before them; additions
    and ReLUs are computed with the layer that they follow. Each layer takes the fastest of the kernels in
    `pruning.catalogue.kernels.KERNELS`, among them PyTorch's own, measured here with torch's number of threads. The
    network runs in float32 on the CPU, without gradients. If it is not faster than the given one, or if its outputs
    differ by more than 1e-4 of the largest, an unchanged copy is returned, and its report says so.

    With `int8`, kernels that round weights and inputs to bytes are measured, too, for layers that gain from zeros:
    `pruning.kernels.byte_kernels` has their equations. Outputs then differ on purpose, and the report says by how much
    each layer moves its outputs; measure your metric. They are fastest where zeros come in blocks of four consecutive
    inputs of an output.

        faster = pruning.to_sparse(model, images[:2], int8=True, batches=training_images)

    The kernels are compiled at first use by the system's C compiler; without one, all layers stay dense.

    Args:
        model: pruned or not; it is not changed. Its outputs in evaluation mode are preserved.
        example: input of the network: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        examples: inputs for whose batch sizes kernels are chosen, by default `example`; other batch sizes run on the
            kernels of the nearest one.
        int8: offer kernels of bytes.
        batches: inputs of the network that calibrate the bytes, by default `examples`: a layer's scale and zero point
            span the values that its inputs have here; values beyond them are taken to the nearest.

    Returns:
        a network in evaluation mode, with the attribute `sparse` (a `Sparse`) and the method `report()`.

    Raises:
        ValueError: `torch.export` cannot trace the model, it does not run on an example, or it runs neither in float32
            nor in float64; `batches` without `int8`, empty, or with values that are not finite; an input is passed in
            another form than `example`.
        TypeError: an input is no tensor, tuple or mapping; `examples` or `batches` is no list; `int8` is no bool; the
            model is sparse already.
    """
    if isinstance(model, SparseNetwork):
        raise TypeError("`model` is sparse already; pass the network that `to_sparse` was given.")
    if not isinstance(int8, bool):
        raise TypeError(f"`int8` (={int8!r}) must be True or False; pass int8=True to offer kernels of bytes.")
    first = arguments_of(example)
    inputs = _listed("examples", examples, first) or [first]
    calibration = inputs if batches is None else _listed("batches", batches, first)
    if batches is not None and not int8:
        raise ValueError(f"`batches` ({len(calibration)} of them) calibrate int8 kernels; pass int8=True with them.")
    if not calibration:
        raise ValueError(
            "`batches` (empty) must hold inputs of the network; leave it out to calibrate with `examples`."
        )
    with torch.autocast("cpu", enabled=False):
        return _to_sparse(model, example, inputs, calibration if int8 else [])


def _to_sparse(
    model: nn.Module, example: Example, inputs: Sequence[Inputs], calibration: Sequence[Inputs]
) -> nn.Module:
    """Return the sparse network; its layers may be rounded if there are inputs for `calibration`."""
    plain = plain_copy(model)
    _check_inputs(
        copy.deepcopy(plain, values_with_history(plain)),
        [
            ("example", arguments_of(example)),
            *(("examples", each) for each in inputs),
            *(("batches", each) for each in calibration),
        ],
    )
    with quiet():  # the result refuses the calls of which `shrink` warns, and torch warns of copies of nested inputs
        smaller = shrink(model, example)
        trace = traced(smaller, example, sizes=_sizes(example))
    before = _values(trace.graph)
    reason = _unavailable()
    skip_needless(trace.graph.graph, {each.nodes[-1] for each in fused_layers(trace)})
    layers, lstms = list(fused_layers(trace)), [] if reason else list(lstm_calls(trace))
    scales = byte_scales(trace.graph, layers, _leaves(trace, calibration)) if calibration else {}
    layers = [replace(each, shape=replace(each.shape, rounding=scales.get(each.x))) for each in layers]
    choosing = KernelChoices(trace.graph, layers, lstms, all_dense=bool(reason))
    choosing.measure(_leaves(trace, inputs))
    hand_on_bytes(choosing, scales)
    reports = choosing.reports()
    with quiet():
        exact = TracedNetwork.of(copy.deepcopy(trace.graph), trace.whole.guard) if calibration else None
        graph = sparse_graph(trace.graph, choosing)
        network = SparseNetwork.of(graph, trace.whole.guard).requires_grad_(False)
    assert isinstance(network, SparseNetwork)
    before |= {new: before[old] for new, old in hold_tensors(network).items() if old in before}
    _restore(network, before)
    dense = copy.deepcopy(plain, values_with_history(plain))
    error = max(output_difference(outputs_of(network, each), outputs_of(dense, each)) for each in inputs)
    others = OtherInputs(plain, arguments_of(example), trace.whole.guard.rules)
    traced_once = exact or network  # rounded outputs differ; the trace without rounding must hold
    if not (elsewhere := others.disagreement(traced_once, TOLERANCE)):
        others.relax(traced_once, TOLERANCE)
        network.guard = traced_once.guard
    speedups = {_size(each): _speedup(dense, network, each) for each in inputs}
    _restore(network, before)
    if error > TOLERANCE and not calibration:
        reason = f"unchanged copy: outputs of the sparse network differ by {error:.2g} of the largest"
    elif elsewhere:
        reason = f"unchanged copy: {elsewhere}"
    elif slow := [size for size, ratio in speedups.items() if ratio < NOISE]:
        reason = f"unchanged copy: at batch {slow[0]} the sparse network is {speedups[slow[0]]:.2f} times as fast"
    elif not reports and not reason:
        reason = "no layer runs on its nonzeros: to_sparse takes linear layers, 1d and 2d convolutions, LSTMs; float32"
    unchanged = reason.startswith("unchanged")
    sparse = Sparse(reports, speedups, torch.get_num_threads(), error, reason)
    network.sparse = sparse
    if not unchanged:
        return network
    plain.sparse = sparse  # type: ignore[assignment]
    plain.report = sparse.__str__  # type: ignore[assignment]
    return plain.eval()


def _listed(name: str, given: Iterable[Example], first: Inputs) -> list[Inputs]:
    """Return inputs of the network as arguments, passed as those of the example, `first`."""
    if isinstance(given, Tensor | Mapping) or not (hasattr(given, "__iter__") or hasattr(given, "__getitem__")):
        raise TypeError(f"`{name}` (a {type(given).__name__}) must be a list of inputs; pass [images[:1], images].")
    found = [arguments_of(each, f"{name}[{place}]") for place, each in enumerate(given)]
    for place, each in enumerate(found):
        if _form(each) != _form(first):
            raise ValueError(f"`{name}[{place}]` ({_form(each)}) must be passed as `example` is ({_form(first)}).")
    return found


def _form(given: Inputs) -> str:
    return f"arguments: {len(given[0])} by position, {', '.join(sorted(given[1])) or 'none'} by name"


def _leaves(trace: Traced, inputs: Sequence[Inputs]) -> list[list[Any]]:
    """Return copies of inputs as the leaves that the traced graph takes."""
    copies = [copied(each) for each in inputs]
    return [tree_leaves((args, {name: kwargs[name] for name in trace.whole.kwargs})) for args, kwargs in copies]


def _sizes(example: Example) -> Sizes:
    """Return which sizes are traced: any sizes of sequences; those of images would take five times as long."""
    images = any(isinstance(leaf, Tensor) and leaf.ndim > 3 for leaf in tree_leaves(example))
    return "batch" if images else "any"


def _unavailable() -> str:
    """Return why no kernel runs, and warn; empty if they do."""
    try:
        library()
    except KernelsUnavailable as error:
        reason = f"all layers are dense: {error}"
        warnings.warn(f"to_sparse: {reason}", stacklevel=4)
        return reason
    return ""


def _values(network: nn.Module) -> dict[str, Tensor]:
    """Return copies of a network's parameters and buffers, which its forward may change."""
    return {name: tensor.detach().clone() for name, tensor in (*network.named_parameters(), *network.named_buffers())}


def _restore(network: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if name in values:
                tensor.copy_(values[name])


def _check_inputs(plain: nn.Module, inputs: Sequence[tuple[str, Inputs]]) -> None:
    """Raise ValueError if the network does not run on inputs, or if they are empty."""
    for name, given in inputs:
        said = ""
        if not _size(given):
            said = "it has no rows"
        else:
            try:
                outputs_of(plain, given)
            except Exception as error:  # a forward may raise anything
                said = f"{type(error).__name__}: {first_line(error)}"
        if said:
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in tree_leaves(given) if isinstance(leaf, Tensor))
            raise ValueError(
                f"`{name}` (shape {shapes}) must be an input of {type(plain).__name__} ({said}); pass one that the "
                "network runs on."
            )


def _size(given: Inputs) -> int:
    """Return the batch size of inputs."""
    return next((len(leaf) for leaf in tree_leaves(given) if isinstance(leaf, Tensor) and leaf.ndim), 1)


def _speedup(one: nn.Module, other: nn.Module, given: Inputs) -> float:
    """Return the ratio of the fastest times of two networks, timed in turns."""
    args, kwargs = copied(given)
    with torch.inference_mode(), quiet():
        calls = {place: functools.partial(each, *args, **kwargs) for place, each in enumerate((one, other))}
        seconds = fastest_seconds(calls, TURNS, TURN)
    return seconds[0] / seconds[1]
