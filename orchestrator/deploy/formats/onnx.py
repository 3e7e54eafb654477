"""Format `onnx`: an ONNX graph for batches of any size, run by ONNX Runtime."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import torch
from torch import Tensor, nn

from orchestrator.deploy.formats.format import Codec, ExportError, Run, fed
from orchestrator.deploy.formats.programs import program_of
from pruning.graph.tracing import Example, quiet

FILE = "network.onnx"
SNIPPET = """\
import onnxruntime

session = onnxruntime.InferenceSession("network.onnx")
(outputs,) = session.run(None, {feed})
"""
UNKNOWN = re.compile(r"No ONNX function found for <OpOverload\(op='([\w.]+)'")
LARGEST = 2**31 - 2**24
"""Largest number of bytes of weights in an ONNX file; larger weights go to a file of their own."""


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the graph; raise ExportError if ONNX lacks an operation."""
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    program = program_of(network, example)
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    try:
        with quiet(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            written = torch.onnx.export(program, dynamo=True, verbose=False, external_data=size > LARGEST)
            assert written is not None
            ClearMetadataAndDocStringPass()(written.model)  # metadata holds file paths of this machine
            written.save(folder / FILE, external_data=size > LARGEST)
    except Exception as error:  # many types, whose messages quote the whole program
        unknown = UNKNOWN.search(str(error)) or UNKNOWN.search(str(error.__cause__))
        if unknown:
            raise ExportError(
                f"ONNX has no operation for {unknown[1]}, which the network uses; take the format torch or safetensors."
            ) from error
        said = (str(error).strip().splitlines() or [""])[0][:200]
        raise ExportError(
            f"{type(network).__name__} cannot be written in ONNX ({type(error).__name__}: {said}); take the format "
            "torch or safetensors."
        ) from error


def load(folder: Path, threads: int) -> Run:
    """Return a function that runs the graph in ONNX Runtime."""
    return running(folder / FILE, threads)


def running(graph: Path, threads: int) -> Run:
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


CODEC = Codec(write, load, (FILE,), "numpy", SNIPPET)
