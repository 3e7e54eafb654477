"""Parts of scripts/does_it_pay in 8 bits: dense layers and networks in int8, and sparse ones beside them.

A layer is measured as a network of one layer, with inputs and outputs in float32.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pruning
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import difference
from orchestrator.workloads.networks.classifiers import lenet_300_100, resnet20
from pruning.choices.axes import Unit
from pruning.measure.latency import Make
from scripts.pages.layer_cells import LAYERS
from scripts.pages.network_cells import (
    MINILM,
    WARMUP,
    Network,
    absent_networks,
    built,
    copies,
    dense_network,
    eager,
    images,
    minilm,
    subjects,
    tokens,
)
from scripts.pages.pay_cells import (
    BEST_INT8,
    INT8_RUNTIMES,
    ONNX_INT8,
    OPENVINO_INT8,
    OPENVINO_VNNI,
    PYTORCH,
    SPARSE_INT8,
    Cell,
    Found,
    Makes,
    Part,
)
from scripts.pages.sparse_runtimes import Layer, in_onnxruntime, in_openvino, not_installed, without_kernels

UNITS = {"1x4 blocks": Unit("block"), "16x4 blocks": Unit("block", outputs=16), "unstructured": Unit()}
"""Pattern -> the unit that `pruning.prune` prunes."""
BLOCKS, TILES, ENTRIES = UNITS
OF_TILES = ((TILES, 0.7), (TILES, 0.8), (TILES, 0.9))
ALL_PATTERNS = ((BLOCKS, 0.7), (BLOCKS, 0.8), (BLOCKS, 0.9), *OF_TILES, (ENTRIES, 0.9))
SPARSEST = ((BLOCKS, 0.9),)
"""Patterns of networks that a sweep trains, and those that are compared with OpenVINO without AMX."""
WIDE_LAYERS = (
    *(Layer(1024, 1024, 64), Layer(1024, 1024, 128), Layer(64, 64, 1, 3, 16), Layer(64, 64, 16, 3, 16)),
    *(Layer(64, 64, 1, 3, 32), Layer(128, 128, 1, 3, 16), Layer(256, 256, 1, 3, 16), Layer(256, 256, 1, 1, 14)),
)
"""Layers that means are over: of 64 channels or more, or with 64 examples or more if they are linear."""
INT8_LAYERS = (*(layer for layer in LAYERS if layer not in WIDE_LAYERS), *WIDE_LAYERS)
CALIBRATION = 32
"""Least number of random inputs that calibrate the ranges of bytes, of dense and of sparse networks."""
TOLERANCE = 0.2
"""Largest allowed difference of a layer's outputs in 8 bits, relative to the largest: a guard against wrong graphs."""
SHOWN = math.inf
"""The same for networks, in which roundings add up: the page shows the differences."""
LIMIT, VNNI = "ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI"
"""Environment variable that limits the instructions of OpenVINO, and its value without AMX."""
_three = (3, 32, 32)
INT8_NETWORKS = (
    Network(
        "LeNet-300-100 on 28x28",
        lambda: built(lambda: lenet_300_100((1, 28, 28), 10)),
        images(1, 28, 28),
        batches=(32,),
    ),
    Network("ResNet-20 on 3x32x32", lambda: built(lambda: resnet20(_three, 10)), images(*_three), batches=(1,)),
    Network(
        "ResNet-20 of width 64 on 3x32x32",
        lambda: built(lambda: resnet20(_three, 10, width=64)),
        images(*_three),
        batches=(1,),
    ),
    *(
        Network(
            f"MiniLM, {length} tokens",
            minilm,
            tokens(1000, 30000, length),
            packages=(MINILM, "transformers"),
            batches=(1,),
        )
        for length in (16, 128)
    ),
)


def int8_parts(trained: Sequence[Network], further: Callable[[Cell], Found]) -> tuple[Part, ...]:
    """Return the parts that any process measures: layers, networks, and networks that a sweep trains."""
    return (
        int8_part(
            map(as_network, INT8_LAYERS),
            "int8_layers",
            ALL_PATTERNS,
            further=lambda cell: {"wide": cell.subject in {layer.name for layer in WIDE_LAYERS}},
        ),
        int8_part(_networks(), "int8_networks", (*SPARSEST, *OF_TILES), tolerance=SHOWN),
        int8_part(trained, "int8_trained", SPARSEST, tolerance=SHOWN, further=further),
    )


def vnni_parts() -> tuple[Part, ...]:
    """Return the parts that a process without AMX measures."""
    limited: dict[str, Any] = {"runtimes": (OPENVINO_VNNI,), "best": OPENVINO_VNNI}
    return (
        int8_part(map(as_network, WIDE_LAYERS), "vnni_layers", SPARSEST, **limited),
        int8_part(_networks(), "vnni_networks", SPARSEST, tolerance=SHOWN, **limited),
    )


def limited_environment() -> Mapping[str, str]:
    """Return the environment of a process whose OpenVINO does without AMX; the variable is read once in a process."""
    return os.environ | {LIMIT: VNNI}


def absent_int8() -> Mapping[str, str]:
    """Return runtime or network -> reason, for those that cannot be measured here."""
    onnx = ("onnx", "onnxscript", "onnxruntime")
    packages = {ONNX_INT8: onnx, OPENVINO_INT8: (*onnx, "openvino")}
    return {**not_installed(packages), **without_kernels(SPARSE_INT8), **absent_networks(INT8_NETWORKS)}


def _networks() -> Iterator[Network]:
    away = absent_networks(INT8_NETWORKS)
    return (network for network in INT8_NETWORKS if network.name not in away)


def as_network(layer: Layer) -> Network:
    """Return a layer as a network."""
    return Network(
        layer.title,
        lambda: layer.module(layer.weights()),
        lambda batch: replace(layer, batch=batch).example(),
        batches=(layer.batch,),
    )


def int8_part(
    networks: Iterator[Network] | Sequence[Network],
    name: str,
    patterns: Sequence[tuple[str, float]],
    *,
    runtimes: Sequence[str] = INT8_RUNTIMES,
    best: str = BEST_INT8,
    tolerance: float = TOLERANCE,
    further: Callable[[Cell], Found] = lambda _: {},
) -> Part:
    """Return the measurements of networks in 8 bits.

    Args:
        networks: the networks, each with its batch sizes.
        name: key of the part in the record.
        patterns: patterns and sparsities of the pruned networks.
        runtimes: runtimes of the dense networks in 8 bits.
        best: the dense runtime besides PyTorch that pruned networks are compared with.
        tolerance: largest allowed difference of outputs, relative to the largest.
        further: cell -> further fields of its measurement, besides `off`, the difference of outputs.
    """
    by_subject, differences = subjects(tuple(networks)), dict[Cell, float]()
    cells: list[Cell] = []
    for subject in by_subject:
        cells += [Cell(subject, runtime, "dense", 0.0, PYTORCH) for runtime in runtimes]
        for pattern, level in patterns:
            compared = (PYTORCH, best) if best == BEST_INT8 else (best,)
            cells += [Cell(subject, SPARSE_INT8, pattern, level, against) for against in compared]

    def makes(cell: Cell, dense_runtime: str) -> Makes:
        made, off = _makes(*by_subject[cell.subject], cell, dense_runtime)
        assert off < tolerance, f"{cell}: outputs are off by {off:.1e}"
        differences[cell] = off
        return made

    return Part(
        name, tuple(cells), makes, warmup=WARMUP, further=lambda cell: {"off": differences[cell], **further(cell)}
    )


def _makes(network: Network, batch: int, cell: Cell, dense_runtime: str) -> tuple[Makes, float]:
    """Return what builds the two calls, and the difference of outputs in 8 bits."""
    example = network.example(batch)
    before = RUNTIMES[dense_runtime](network, example)
    if cell.pattern == "dense":
        after, expected = RUNTIMES[cell.runtime](network, example), dense_network(network)(example)
    else:
        pruned, faster = _sparse(network, batch, cell.pattern, cell.sparsity)
        after, expected = copies(faster, example), pruned(example)
    outputs = after()()
    assert isinstance(outputs, Tensor)
    return (before, after), difference(outputs, expected)


@lru_cache(maxsize=1)
def _sparse(network: Network, batch: int, pattern: str, sparsity: float) -> tuple[nn.Module, nn.Module]:
    """Return the pruned network, and the same through `to_sparse` in 8 bits."""
    pruned, example = network.pruned(dense_network(network), sparsity, UNITS[pattern]), network.example(batch)
    return pruned, pruning.to_sparse(pruned, example, int8=True, batches=[_calibration(network)])


def _calibration(network: Network) -> Tensor:
    """Return the inputs that calibrate a network: those that are timed, if they are more than `CALIBRATION`."""
    return network.example(max(CALIBRATION, *network.batches))


@lru_cache(maxsize=1)
def _quantised(network: Network) -> tempfile.TemporaryDirectory[str]:
    """Return a folder with the dense network as the format `onnx_int8` writes it."""
    folder = tempfile.TemporaryDirectory()
    CODECS["onnx_int8"].write(dense_network(network), (_calibration(network),), Path(folder.name))
    return folder


def _in_int8(network: Network, example: Tensor, *, run: Callable[[str, Tensor], Any]) -> Make:
    """Load the graph in 8 bits in each block."""
    (name,) = CODECS["onnx_int8"].files
    return partial(run, str(Path(_quantised(network).name, name)), example)


RUNTIMES: Mapping[str, Callable[[Network, Tensor], Make]] = {
    PYTORCH: eager,
    ONNX_INT8: partial(_in_int8, run=in_onnxruntime),
    OPENVINO_INT8: partial(_in_int8, run=partial(in_openvino, settings={})),
    OPENVINO_VNNI: partial(_in_int8, run=partial(in_openvino, settings={})),
}
"""Name of a runtime -> function that returns what builds a dense network's call on it."""


def has_amx() -> bool:
    """Whether the processor multiplies bytes in tiles (AMX)."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())
