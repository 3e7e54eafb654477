"""Formats `sparse` and `sparse_int8`: nonzero weights and their positions, and a generated module that runs on them.

In `sparse_int8` layers round weights and inputs to bytes where that is faster. The module needs the package `pruning`,
whose kernels compute the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

import pruning
from orchestrator.deploy.formats import generated_module
from orchestrator.deploy.formats.format import (
    CALIBRATION,
    Codec,
    ExportError,
    Run,
    calibration_batches,
    call_values,
    cut,
    resized,
)
from pruning.compact.rewriting import call_functions
from pruning.compact.sparse_files import STEM, layers_of, save_layers, steps_of, tensors_of
from pruning.compact.traced_network import TracedNetwork
from pruning.graph.tracing import Example, traced
from pruning.kernels.compiling import KernelsUnavailable
from pruning.kernels.library import library

INT8 = "sparse_int8_network"
"""Name of the files in 8 bits, without their endings."""
TEMPLATE = '''\
"""{title} with sparse layers, written by pruning-orchestrator. The layers are in files in the same folder.

    module = load()
    outputs = module({inputs})

Loading needs torch, safetensors and pruning-orchestrator. The network is in evaluation mode, runs in float32 on the
CPU, and computes no gradients.
"""

{imports}from math import inf, nan
from pathlib import Path

import torch
from torch import device, nn

from pruning.compact.sparse_files import load_layers
from pruning.graph.input_guard import InputGuard, TensorInput

INPUTS = {inputs_taken}
NAMES = [
{names}]


class Network(nn.Module):
{forward}

def load(folder=None):
    """Return the network with its layers and tensors, loaded from `folder` and checked."""
    return load_layers(folder or Path(__file__).parent, Network(), NAMES, INPUTS, {stem!r})
'''


def write(
    network: nn.Module,
    example: Example,
    folder: Path,
    *,
    batch_sizes: Sequence[int] = (),
    calibration: Sequence[Example] = (),
    stem: str = STEM,
) -> None:
    """Choose the kernels of a network by measurement, and write its layers and the operations between them.

    Args:
        network: the shrunk network in evaluation mode.
        example: its inputs, a batch of 2 or more.
        folder: where the files are written.
        batch_sizes: batch sizes for which kernels are chosen, by default 1 and the example's.
        calibration: batches for the ranges of bytes; none: all layers stay in float32.
        stem: the name of the files, without their endings.

    Raises:
        ExportError: no kernel can be compiled here, the network cannot be traced, or an operation cannot be written.
    """
    try:
        library()
    except KernelsUnavailable as error:
        raise ExportError(f"sparse layers cannot be measured here: {error}") from error
    sizes = dict.fromkeys(batch_sizes or (1, len(call_values(example)[0])))
    try:
        examples = [resized(example, size) for size in sizes]
        sparse = pruning.to_sparse(
            network, example, examples=examples, int8=bool(calibration), batches=calibration or None
        )
        graph = sparse if isinstance(sparse, TracedNetwork) else _traced(sparse, example)
    except ValueError as error:
        raise ExportError(str(error)) from error
    tensors = tensors_of(graph)
    names = [*layers_of(graph), *steps_of(graph), *tensors]
    inputs = [str(node.target) for node in graph.graph.find_nodes(op="placeholder")]
    save_layers(graph, folder, stem)
    forward, imports = generated_module.forward_code(graph.graph, {name: name for name in tensors})
    text = TEMPLATE.format(
        title=type(network.network if hasattr(network, "network") else network).__name__,
        inputs=", ".join(inputs),
        imports=imports,
        inputs_taken=replace(graph.guard, positional=len(inputs), keywords=()),
        names="".join(f"    {name!r},\n" for name in names),
        forward=forward,
        stem=stem,
    )
    (folder / f"{stem}.py").write_text(text)


def write_int8(network: nn.Module, example: Example, folder: Path, *, batch_sizes: Sequence[int] = ()) -> None:
    """Write the network as `write` does, with kernels of bytes; `example` has the examples that calibrate them."""
    calibration, two = calibration_batches(example), cut(example, 2)
    write(network, two, folder, batch_sizes=batch_sizes, calibration=calibration, stem=INT8)


def _traced(network: nn.Module, example: Example) -> TracedNetwork:
    """Return the operations of a network that is not faster as a sparse one."""
    trace = traced(network, example, sizes="batch")
    call_functions(trace.graph.graph)
    return TracedNetwork.of(trace.graph, trace.whole.guard)


def codec(writer: Callable[..., None], stem: str, calibration: int = 0) -> Codec:
    """Return the format of a writer; loading executes the module's code, so only load your own files."""

    def load(folder: Path, threads: int) -> Run:
        return generated_module.loaded(folder / f"{stem}.py", threads)

    return Codec(
        writer,
        load,
        (f"{stem}.py", f"{stem}.safetensors", f"{stem}.json"),
        "torch",
        generated_module.SNIPPET.replace("network", stem),
        calibration=calibration,
        runs_code=True,
        takes_batch_sizes=True,
        against_fastest=True,
        needs_engine=True,
    )


SPARSE = codec(write, STEM)
SPARSE_INT8 = codec(write_int8, INT8, CALIBRATION)
