"""Part of scripts/does_it_pay that measures single layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from pruning.measure.latency import Make
from scripts.pages.pay_cells import BEST, PYTORCH, SPARSE, Cell, Makes, Part
from scripts.pages.sparse_runtimes import RUNTIMES, Layer, Runtime, pruned

LAYERS = (
    *(Layer(256, 256, 1), Layer(1024, 1024, 1), Layer(1024, 1024, 64), Layer(4096, 1024, 1)),
    *(Layer(16, 16, 1, 3, 32), Layer(64, 64, 1, 3, 16), Layer(64, 64, 16, 3, 16), Layer(256, 256, 1, 1, 14)),
)
FURTHER = (Layer(128, 128, 1, 3, 16),)
"""Layers that only `--kernels` measures, too."""
QUICK = (Layer(32, 32, 2),)
ALL_LEVELS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
UNSTRUCTURED = {"CSR (torch.sparse)": ALL_LEVELS, SPARSE: ALL_LEVELS}
ZEROS, NO_ZEROS, CHANNELS = (0.5, 0.9, 0.95), (0.9,), (0.5, 0.75)
KERNELS = (SPARSE, "unstructured", PYTORCH)
BY_NAME = {runtime.name: runtime for runtime in RUNTIMES}


def layer_part(layers: tuple[Layer, ...]) -> Part:
    """Return the measurements of layers."""
    by_name = {layer.name: layer for layer in layers}
    return Part("layers", tuple(_cells(layers)), lambda cell, dense: _makes(by_name[cell.subject], cell, dense))


def kernel_part() -> Part:
    """Return the measurements of `--kernels`: the sparse kernels on single entries, against PyTorch."""
    part = layer_part((*LAYERS, *FURTHER))
    kept = [cell for cell in part.cells if (cell.runtime, cell.pattern, cell.against) == KERNELS]
    return replace(part, cells=tuple(cell for cell in kept if cell.sparsity <= max(ZEROS)))


def _cells(layers: tuple[Layer, ...]) -> Iterator[Cell]:
    for layer in layers:
        for runtime in RUNTIMES:
            if runtime.runs_dense and runtime.name != PYTORCH:
                yield Cell(layer.name, runtime.name, "dense", 0.0, PYTORCH)
            for against in _against(runtime):
                yield from _of_runtime(layer, runtime, against)


def _against(runtime: Runtime) -> tuple[str, ...]:
    """Return the dense runtimes that a runtime is timed against."""
    if runtime.runs_dense:
        return (runtime.name,)
    return (PYTORCH, BEST) if runtime.name == SPARSE else (PYTORCH,)


def _of_runtime(layer: Layer, runtime: Runtime, against: str) -> Iterator[Cell]:
    levels = UNSTRUCTURED.get(runtime.name, ZEROS if runtime.reads_zeros else NO_ZEROS)
    yield from (Cell(layer.name, runtime.name, "unstructured", level, against) for level in levels)
    yield Cell(layer.name, runtime.name, "2:4", 0.5, against)
    if runtime.shrinks:
        yield from (Cell(layer.name, runtime.name, "channels", level, against) for level in CHANNELS)


def _makes(layer: Layer, cell: Cell, dense_runtime: str) -> Makes:
    runtime, beside = BY_NAME[cell.runtime], BY_NAME[dense_runtime]
    example, dense = layer.example(), layer.weights()
    weights = dense if cell.pattern == "dense" else pruned(layer, cell.pattern, cell.sparsity)
    zeros = 0.0 if cell.pattern in ("dense", "channels") else cell.sparsity
    torch._dynamo.reset()
    after = _maker(runtime, layer, weights, example, zeros)
    expected, outputs = layer.apply(example, *weights), after()()
    assert isinstance(outputs, Tensor)
    off = float((outputs - expected).abs().max() / expected.abs().max())
    assert off < runtime.tolerance, f"{cell}: outputs are off by {off:.1e}"
    return _maker(beside, layer, dense, example, 0.0), after


def _maker(runtime: Runtime, *given: Any) -> Make:
    """Return what builds the runner in each block, or once for all of them."""
    build = partial(runtime.make, *given)
    return build if runtime.rebuilt else cache(build)
