"""Catalogue of deployment formats, in which pruned networks are written, measured and exported.

A row's code is an `orchestrator.deploy.formats.format.Codec`; "shrink" has no code, as it is the network in PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Row, named

PYTORCH, RUNTIME = 1e-5, 1e-4
"""Tolerances for PyTorch's kernels on smaller tensors, and for the kernels of other runtimes."""


@dataclass(frozen=True)
class FormatRow(Row):
    """Row of a format.

    Args:
        tolerance: largest difference of outputs from the masked network in PyTorch, relative to the largest output, in
            float32. Infinite for a format that changes outputs: the network's metrics are then measured in it.
        measured: whether a sweep can deploy a network in this format and measure it.
        exported: whether the command `export` writes this format.
        builder: package that builds the networks that the format can hold; empty: any network.
        needs_compiler: whether writing it needs a C compiler.
    """

    FAMILY: ClassVar[str] = "format"

    tolerance: float = PYTORCH
    measured: bool = True
    exported: bool = True
    builder: str = ""
    needs_compiler: bool = False

    @property
    def changes_outputs(self) -> bool:
        """Whether outputs in this format differ from PyTorch's on purpose, so that metrics must be measured again."""
        return math.isinf(self.tolerance)

    def holds(self, packages: Collection[str]) -> bool:
        """Return whether the format can hold networks of a model that needs these packages."""
        return not self.builder or self.builder in packages


SHRINK = "shrink"
"""Format without files: the network itself, in PyTorch."""
_ONNX = ("onnx", "onnxscript", "onnxruntime")

FORMATS: Mapping[str, FormatRow] = named(
    (
        FormatRow(SHRINK, "", "PyTorch, without the channels, units and heads that are empty", exported=False),
        FormatRow(
            "safetensors",
            "orchestrator.deploy.formats.generated_module:CODEC",
            "weights in safetensors, and a module of plain PyTorch that loads them",
            measured=False,
        ),
        FormatRow("torch", "orchestrator.deploy.formats.programs:TORCH", "a program of torch.export"),
        FormatRow(
            "onnx",
            "orchestrator.deploy.formats.programs:ONNX",
            "a graph of ONNX, for ONNX Runtime",
            packages=_ONNX,
            extra="export",
            tolerance=RUNTIME,
        ),
        FormatRow(
            "onnx_int8",
            "orchestrator.deploy.formats.programs:ONNX_INT8",
            "a graph of ONNX with weights and activations of 8 bits, for ONNX Runtime",
            packages=_ONNX,
            extra="export",
            tolerance=math.inf,
        ),
        FormatRow(
            "openvino",
            "orchestrator.deploy.formats.programs:OPENVINO",
            "a graph of OpenVINO",
            packages=("onnx", "onnxscript", "openvino"),
            extra="export",
            tolerance=RUNTIME,
        ),
        FormatRow(
            "huggingface",
            "orchestrator.deploy.formats.huggingface_format:CODEC",
            "a directory that stock transformers loads: config.json, model.safetensors, and the tokenizer's files",
            packages=("transformers",),
            extra="transformers",
            tolerance=RUNTIME,
            builder="transformers",
        ),
        FormatRow(
            "sparse",
            "orchestrator.deploy.formats.sparse:SPARSE",
            "PyTorch on the nonzero weights alone, by kernels of this package",
            tolerance=RUNTIME,
            version=3,
            needs_compiler=True,
        ),
        FormatRow(
            "sparse_int8",
            "orchestrator.deploy.formats.sparse:SPARSE_INT8",
            "PyTorch on the nonzero weights alone, in 8 bits where that is faster, by kernels of this package",
            tolerance=math.inf,
            version=5,
            needs_compiler=True,
        ),
    )
)
"""Name -> format."""
