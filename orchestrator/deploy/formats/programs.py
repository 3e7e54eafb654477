"""Formats of programs: `torch` of torch.export, and the graphs `onnx`, `onnx_int8` and `openvino`."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from orchestrator.deploy.formats.format import (
    CALIBRATION,
    Codec,
    ExportError,
    Run,
    calibration_batches,
    cut,
    fed,
    first_line,
    running,
)
from pruning.graph.tracing import Example, arguments_of, exported, quiet

PROGRAM = "network.pt2"
PROGRAM_SNIPPET = """\
network = torch.export.load("network.pt2").module()
outputs = network({call})
"""


def program_of(network: nn.Module, example: Example) -> ExportedProgram:
    """Return the program of a network for batches of any size; raise ExportError if the network cannot be traced."""
    try:
        with quiet():
            return exported(network, *arguments_of(example), sizes="batch")
    except ValueError as error:
        raise ExportError(str(error)) from error


def write_program(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the program without its example inputs and without file paths of this machine."""
    program = program_of(network, example)
    program.example_inputs = None
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)
    with quiet():
        torch.export.save(program, folder / PROGRAM)


def load_program(folder: Path, threads: int) -> Run:
    """Return a function that runs the program."""
    torch.set_num_threads(threads)
    with quiet():
        return running(torch.export.load(folder / PROGRAM).module())


TORCH = Codec(write_program, load_program, (PROGRAM,), "torch", PROGRAM_SNIPPET, runs_code=True)


ONNX_FILE = "network.onnx"
ONNX_SNIPPET = """\
import onnxruntime

session = onnxruntime.InferenceSession("network.onnx")
(outputs,) = session.run(None, {feed})
"""
UNKNOWN = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
LARGEST = 2**31 - 2**24
"""Largest number of bytes of weights in an ONNX file; larger weights go to a file of their own."""


def write_onnx(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the graph; raise ExportError if ONNX lacks an operation."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    program = program_of(network, example)
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            written = torch.onnx.export(program, dynamo=True, verbose=False, external_data=size > LARGEST)
            assert written is not None
            ClearMetadataAndDocStringPass()(written.model)  # metadata holds file paths of this machine
            written.save(folder / ONNX_FILE, external_data=size > LARGEST)
    except Exception as error:  # many types, whose messages quote the whole program
        unknown = UNKNOWN.search(str(error)) or UNKNOWN.search(str(error.__cause__))
        if unknown:
            raise ExportError(
                f"ONNX has no operation for {unknown[1]}, which the network uses; take the format torch or safetensors."
            ) from error
        raise ExportError(
            f"{type(network).__name__} cannot be written in ONNX ({first_line(error)}); take the format "
            "torch or safetensors."
        ) from error


def load_onnx(folder: Path, threads: int) -> Run:
    """Return a function that runs the graph in ONNX Runtime."""
    return in_onnx_runtime(folder / ONNX_FILE, threads)


def in_onnx_runtime(graph: Path, threads: int) -> Run:
    """Return a function that runs a graph in ONNX Runtime, on `threads` threads of the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]

    def run(example: Example) -> Tensor:
        (outputs,) = session.run(None, fed(example, names))
        return torch.from_numpy(outputs)

    return run


ONNX = Codec(write_onnx, load_onnx, (ONNX_FILE,), "numpy", ONNX_SNIPPET)


INT8_FILE = "network.int8.onnx"
INT8_SNIPPET = ONNX_SNIPPET.replace(ONNX_FILE, INT8_FILE)
SUFFIX = "_quantized"
"""Suffix that ONNX Runtime adds to a weight's name for its integers."""


def write_int8(network: nn.Module, example: Example, folder: Path) -> None:
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
        write_onnx(network, cut(example, 2), Path(made))
        try:
            with quiet(), _unlogged(), contextlib.redirect_stdout(io.StringIO()):
                quantization.quantize_static(
                    Path(made, ONNX_FILE),
                    folder / INT8_FILE,
                    _reader(Path(made, ONNX_FILE), example),
                    per_channel=True,
                    reduce_range=True,
                    activation_type=quantization.QuantType.QUInt8,
                    weight_type=quantization.QuantType.QInt8,
                )
        except Exception as error:  # ONNX Runtime raises many types
            raise ExportError(
                f"{type(network).__name__} cannot be quantised ({first_line(error)}); take the format onnx."
            ) from error
        hold_zeros(Path(made, ONNX_FILE), folder / INT8_FILE)


def load_int8(folder: Path, threads: int) -> Run:
    """Return a function that runs the graph in ONNX Runtime."""
    return in_onnx_runtime(folder / INT8_FILE, threads)


def _reader(graph: Path, example: Example) -> Any:
    """Return a CalibrationDataReader that yields `example` in batches of `BATCH`, by name of the graph's inputs."""
    from onnx import load
    from onnxruntime.quantization import CalibrationDataReader

    names = [each.name for each in load(graph, load_external_data=False).graph.input]
    parts = iter([fed(each, names) for each in calibration_batches(example)])

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


ONNX_INT8 = Codec(write_int8, load_int8, (INT8_FILE,), "numpy", INT8_SNIPPET, calibration=CALIBRATION)


OPENVINO_FILE, OPENVINO_WEIGHTS = "network.xml", "network.bin"
OPENVINO_SNIPPET = """\
import openvino

precision = {{"INFERENCE_PRECISION_HINT": "f32"}}  # else bfloat16 where the processor has it
compiled = openvino.Core().compile_model("network.xml", "CPU", precision)
outputs = compiled({feed})[0]
"""


def write_openvino(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the graph and its weights in float32; raise ExportError as `onnx.write` does, or if conversion fails."""
    import openvino

    with tempfile.TemporaryDirectory() as made:
        write_onnx(network, example, Path(made))
        try:
            model = openvino.convert_model(Path(made, ONNX_FILE))
        except Exception as error:  # OpenVINO raises many types
            raise ExportError(
                f"{type(network).__name__} cannot be converted to OpenVINO ({first_line(error)}); take the format onnx."
            ) from error
        openvino.save_model(model, folder / OPENVINO_FILE, compress_to_fp16=False)


def load_openvino(folder: Path, threads: int) -> Run:
    """Return a function that runs the graph in OpenVINO, in float32."""
    return in_openvino(folder / OPENVINO_FILE, threads)


def in_openvino(graph: Path, threads: int) -> Run:
    """Return a function that runs a graph in OpenVINO, on `threads` threads of the CPU; floats stay float32."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(graph, "CPU", settings)
    names = [each.get_any_name() for each in compiled.inputs]

    def run(example: Example) -> Tensor:
        return torch.from_numpy(compiled(fed(example, names))[0])

    return run


OPENVINO = Codec(write_openvino, load_openvino, (OPENVINO_FILE, OPENVINO_WEIGHTS), "numpy", OPENVINO_SNIPPET)
