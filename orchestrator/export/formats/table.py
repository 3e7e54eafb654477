"""The formats by name, and how far outputs in each may differ from the masked network's."""

from __future__ import annotations

import math
from collections.abc import Mapping

from orchestrator.config.parts.deploy import PACKAGES
from orchestrator.export.formats import generated, onnx, onnx_int8, openvino, programs
from orchestrator.export.formats.format import Format

SHRINK = "shrink"
"""What is deployed without a format: the network itself, in PyTorch."""
PYTORCH, RUNTIME = 1e-5, 1e-4
"""Tolerances, see `Format`: of PyTorch's own kernels on smaller tensors, and of those of other runtimes."""

FORMATS: Mapping[str, Format] = {
    each.name: each
    for each in (
        Format(
            "safetensors",
            "weights in safetensors, and a module of plain PyTorch that loads them",
            generated.write,
            generated.load,
            files=(generated.MODULE, generated.WEIGHTS),
            needs=(),
            tolerance=PYTORCH,
            arrays="torch",
            snippet=generated.SNIPPET,
        ),
        Format(
            "torch",
            "a program of torch.export",
            programs.write,
            programs.load,
            files=(programs.FILE,),
            needs=(),
            tolerance=PYTORCH,
            arrays="torch",
            snippet=programs.SNIPPET,
        ),
        Format(
            "onnx",
            "a graph of ONNX, for ONNX Runtime",
            onnx.write,
            onnx.load,
            files=(onnx.FILE,),
            needs=PACKAGES["onnx"],
            tolerance=RUNTIME,
            arrays="numpy",
            snippet=onnx.SNIPPET,
        ),
        Format(
            "onnx_int8",
            "a graph of ONNX with weights and activations of 8 bits, for ONNX Runtime",
            onnx_int8.write,
            onnx_int8.load,
            files=(onnx_int8.FILE,),
            needs=PACKAGES["onnx_int8"],
            tolerance=math.inf,
            arrays="numpy",
            snippet=onnx_int8.SNIPPET,
            calibration=onnx_int8.CALIBRATION,
        ),
        Format(
            "openvino",
            "a graph of OpenVINO",
            openvino.write,
            openvino.load,
            files=(openvino.FILE, openvino.WEIGHTS),
            needs=PACKAGES["openvino"],
            tolerance=RUNTIME,
            arrays="numpy",
            snippet=openvino.SNIPPET,
        ),
    )
}
TOLERANCES: Mapping[str, float] = {SHRINK: PYTORCH, **{name: each.tolerance for name, each in FORMATS.items()}}
"""What is deployed -> how far its outputs may differ."""
