"""Format `openvino`: an OpenVINO graph, converted from the ONNX graph."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn

from orchestrator.deploy.formats import onnx
from orchestrator.deploy.formats.format import Codec, ExportError, Run, fed
from pruning.graph.tracing import Example

FILE, WEIGHTS = "network.xml", "network.bin"
SNIPPET = """\
import openvino

precision = {{"INFERENCE_PRECISION_HINT": "f32"}}  # else bfloat16 where the processor has it
compiled = openvino.Core().compile_model("network.xml", "CPU", precision)
outputs = compiled({feed})[0]
"""


def write(network: nn.Module, example: Example, folder: Path) -> None:
    """Write the graph and its weights in float32; raise ExportError as `onnx.write` does, or if conversion fails."""
    import openvino

    with tempfile.TemporaryDirectory() as made:
        onnx.write(network, example, Path(made))
        try:
            model = openvino.convert_model(Path(made, onnx.FILE))
        except Exception as error:  # OpenVINO raises many types
            said = (str(error).strip().splitlines() or [""])[0][:200]
            raise ExportError(
                f"{type(network).__name__} cannot be converted to OpenVINO ({type(error).__name__}: {said}); take the "
                "format onnx."
            ) from error
        openvino.save_model(model, folder / FILE, compress_to_fp16=False)


def load(folder: Path, threads: int) -> Run:
    """Return a function that runs the graph in OpenVINO, in float32."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.Core().compile_model(folder / FILE, "CPU", settings)
    names = [each.get_any_name() for each in compiled.inputs]

    def run(example: Example) -> Tensor:
        return torch.from_numpy(compiled(fed(example, names))[0])

    return run


CODEC = Codec(write, load, (FILE, WEIGHTS), "numpy", SNIPPET)
