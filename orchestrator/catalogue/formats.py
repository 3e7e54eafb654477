"""The catalogue of deployment formats: what a pruned network is written as, measured in and exported to.

A row's code is an `orchestrator.deploy.formats.format.Codec`; "shrink" has none: it is the network in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Row, named

PYTORCH, RUNTIME = 1e-5, 1e-4
"""Tolerances: of PyTorch's own kernels on smaller tensors, and of those of other runtimes."""


@dataclass(frozen=True)
class Format(Row):
    """A format.

    Args:
        tolerance: how far outputs may differ from the masked network's in PyTorch, relative to the largest, in float32;
            infinite where they are others, and what the network achieves in this format is measured.
        measured: a sweep can deploy a network in it and measure it.
        exported: the command `export` writes it.
    """

    FAMILY: ClassVar[str] = "format"

    tolerance: float = PYTORCH
    measured: bool = True
    exported: bool = True


SHRINK = "shrink"
"""The format without files: the network itself, in PyTorch."""
_ONNX = ("onnx", "onnxscript", "onnxruntime")

FORMATS: Mapping[str, Format] = named(
    (
        Format(SHRINK, "", "PyTorch, without the channels, units and heads that are empty", exported=False),
        Format(
            "safetensors",
            "orchestrator.deploy.formats.generated_module:CODEC",
            "weights in safetensors, and a module of plain PyTorch that loads them",
            measured=False,
        ),
        Format("torch", "orchestrator.deploy.formats.programs:CODEC", "a program of torch.export"),
        Format(
            "onnx",
            "orchestrator.deploy.formats.onnx:CODEC",
            "a graph of ONNX, for ONNX Runtime",
            packages=_ONNX,
            extra="export",
            tolerance=RUNTIME,
        ),
        Format(
            "onnx_int8",
            "orchestrator.deploy.formats.onnx_int8:CODEC",
            "a graph of ONNX with weights and activations of 8 bits, for ONNX Runtime",
            packages=_ONNX,
            extra="export",
            tolerance=math.inf,
        ),
        Format(
            "openvino",
            "orchestrator.deploy.formats.openvino:CODEC",
            "a graph of OpenVINO",
            packages=("onnx", "onnxscript", "openvino"),
            extra="export",
            tolerance=RUNTIME,
        ),
    )
)
"""Name -> format."""
