"""Format `onnx_int8`: the graph of `onnx` with 8-bit weights and activations, run by ONNX Runtime.

Weights are quantised symmetrically with one scale for each channel, so zeros stay zeros. They use 7 of their 8 bits, so
that sums of products do not saturate on x86 processors without VNNI. Activations are unsigned; their ranges are
measured on examples of the training split.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from orchestrator.deploy.formats import onnx
from orchestrator.deploy.formats.format import Codec, ExportError, Run, call_values, cut, fed
from pruning.graph.tracing import Example, quiet

FILE = "network.int8.onnx"
SNIPPET = onnx.SNIPPET.replace(onnx.FILE, FILE)
CALIBRATION, BATCH = 256, 32
"""Number of training examples for the ranges of activations, and the batch size in which they run."""
SUFFIX = "_quantized"
"""Suffix that ONNX Runtime adds to a weight's name for its integers."""


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the 8-bit graph.

    Args:
        network: the network in evaluation mode.
        example: inputs for `CALIBRATION` examples of the training split, or for all if there are fewer.
        folder: where `FILE` is written.

    Raises:
        ExportError: ONNX lacks an operation, the graph cannot be quantised, or a zero would become another value
    """
    from onnxruntime import quantization

    with tempfile.TemporaryDirectory() as made:
        onnx.write(network, cut(example, 2), Path(made))
        try:
            with quiet(), _unlogged(), contextlib.redirect_stdout(io.StringIO()):
                quantization.quantize_static(
                    Path(made, onnx.FILE),
                    folder / FILE,
                    _reader(Path(made, onnx.FILE), example),
                    per_channel=True,
                    reduce_range=True,
                    activation_type=quantization.QuantType.QUInt8,
                    weight_type=quantization.QuantType.QInt8,
                )
        except Exception as error:  # ONNX Runtime raises many types
            said = (str(error).strip().splitlines() or [""])[0][:200]
            raise ExportError(
                f"{type(network).__name__} cannot be quantised ({type(error).__name__}: {said}); take the format onnx."
            ) from error
        hold_zeros(Path(made, onnx.FILE), folder / FILE)


def load(folder: Path, threads: int) -> Run:
    """Return a function that runs the graph in ONNX Runtime."""
    return onnx.running(folder / FILE, threads)


def _reader(graph: Path, example: Example) -> Any:
    """Return a CalibrationDataReader that yields `example` in batches of `BATCH`, by name of the graph's inputs."""
    from onnx import load
    from onnxruntime.quantization import CalibrationDataReader

    names = [each.name for each in load(graph, load_external_data=False).graph.input]
    count = len(call_values(example)[0])
    parts = iter([fed(cut(example, BATCH, start), names) for start in range(0, count, BATCH)])

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def get_next(self) -> Mapping[str, Any] | None:
            return next(parts, None)

    return Reader()


@contextlib.contextmanager
def _unlogged() -> Iterator[None]:
    """Silence the root logger below errors, and keep libraries from adding a handler to it."""
    root, silent = logging.getLogger(), logging.NullHandler()
    level = root.level
    root.addHandler(silent)
    root.setLevel(logging.ERROR)
    try:
        yield
    finally:
        root.setLevel(level)
        root.removeHandler(silent)


def hold_zeros(graph: Path, quantised: Path) -> None:
    """Raise ExportError if zeros of a weight are not zeros once quantised, or if int8 weights have a zero point."""
    weights, held, points = _tensors(graph), _tensors(quantised), _zero_points(quantised)
    for name, weight in weights.items():
        if weight.ndim < 2 or not (zeros := weight == 0).any():
            continue
        stored = name if name in held else name + SUFFIX
        values, zero = held.get(stored, np.ones_like(weight)), held.get(points.get(stored, ""), np.zeros(1))
        shifted = zero.any() if values.dtype == np.int8 else zero.size > 1
        if values.shape != weight.shape or shifted or (values[zeros] != zero.flat[0]).any():
            raise ExportError(
                f"the format onnx_int8 does not keep the zeros of {name}, {int(zeros.sum())} of {weight.size} weights, "
                "as zeros; take the format onnx."
            )


def _tensors(graph: Path) -> dict[str, np.ndarray[Any, Any]]:
    from onnx import load, numpy_helper

    model = load(graph)
    return {each.name: numpy_helper.to_array(each, str(graph.parent)) for each in model.graph.initializer}


def _zero_points(graph: Path) -> dict[str, str]:
    """Return name of a quantised tensor -> name of its zero point, for the tensors that have one."""
    from onnx import load

    nodes = [node for node in load(graph).graph.node if node.op_type == "DequantizeLinear"]
    return {node.input[0]: node.input[2] for node in nodes if len(node.input) > 2}


CODEC = Codec(write, load, (FILE,), "numpy", SNIPPET, calibration=CALIBRATION)
