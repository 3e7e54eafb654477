"""The formats by name."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.config.parts.deploy import PACKAGES
from orchestrator.export.formats import generated, onnx, openvino, programs
from orchestrator.export.formats.format import Format

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
            tolerance=1e-4,
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
            tolerance=1e-5,
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
            tolerance=1e-4,
            arrays="numpy",
            snippet=onnx.SNIPPET,
        ),
        Format(
            "openvino",
            "a graph of OpenVINO",
            openvino.write,
            openvino.load,
            files=(openvino.FILE, openvino.WEIGHTS),
            needs=PACKAGES["openvino"],
            tolerance=1e-4,
            arrays="numpy",
            snippet=openvino.SNIPPET,
        ),
    )
}
