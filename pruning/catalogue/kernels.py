"""Catalogue of the kernels that compute a layer from its nonzero weights; the code is in `pruning/kernels/`.

A row's code is a `pruning.kernels.sparse_weight.Kernel`. `pruning.to_sparse` measures all kernels of a layer's kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from pruning.catalogue.rows import Row, named

LINEAR, CONVOLUTION = "linear", "convolution"


@dataclass(frozen=True)
class KernelRow(Row):
    """A kernel.

    Args:
        kinds: kinds of layers that it computes: "linear", "convolution".
        rounds: whether it rounds weights and inputs, so that outputs differ on purpose.
    """

    FAMILY: ClassVar[str] = "kernel"

    kinds: tuple[str, ...] = (LINEAR,)
    rounds: bool = False


DENSE = "dense"
KERNELS: Mapping[str, KernelRow] = named(
    (
        KernelRow(
            DENSE,
            "pruning.kernels.dense_kernel:KERNEL",
            "PyTorch's own operation on all weights",
            kinds=(LINEAR, CONVOLUTION),
        ),
        KernelRow("rows", "pruning.kernels.row_kernel:KERNEL", "one output of one example at a time"),
        KernelRow(
            "lookup",
            "pruning.kernels.lookup_kernel:KERNEL",
            "16 outputs of one example at a time, inputs looked up in registers; needs AVX-512",
        ),
        KernelRow("columns", "pruning.kernels.column_kernel:KERNEL", "each weight times a tile of examples"),
        KernelRow(
            "pixels", "pruning.kernels.pixel_kernel:KERNEL", "each weight times a tile of pixels", kinds=(CONVOLUTION,)
        ),
        KernelRow(
            "lookup_int8",
            "pruning.kernels.byte_kernels:LOOKUP",
            "four weights and inputs as bytes, 16 outputs of one example at a time; needs AVX-512; layers whose inputs "
            "have a scale",
            rounds=True,
        ),
        KernelRow(
            "columns_int8",
            "pruning.kernels.byte_kernels:COLUMNS",
            "four weights and inputs as bytes times a tile of examples; layers whose inputs have a scale",
            rounds=True,
        ),
        KernelRow(
            "pixels_int8",
            "pruning.kernels.byte_kernels:PIXELS",
            "four weights and inputs as bytes times a tile of pixels; layers whose inputs have a scale",
            kinds=(CONVOLUTION,),
            rounds=True,
        ),
        KernelRow(
            "columns_amx",
            "pruning.kernels.group_kernels:COLUMNS",
            "four weights of 16 outputs and inputs as bytes, in tiles of AMX; layers whose inputs have a scale",
            rounds=True,
        ),
        KernelRow(
            "pixels_amx",
            "pruning.kernels.group_kernels:PIXELS",
            "four weights of 16 outputs and pixels as bytes, in tiles of AMX; layers whose inputs have a scale",
            kinds=(CONVOLUTION,),
            rounds=True,
        ),
    )
)
"""Name -> kernel."""
