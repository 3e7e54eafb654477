"""The compiled kernels, as C functions with a common order of arguments."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from pruning.kernels.compiling import KernelsUnavailable, library_file
from pruning.kernels.kernel import Run
from pruning.kernels.sparse_weight import LayerShape

REASONS = {1: "not enough memory", 2: "the input is too large for 32-bit positions"}
"""Code that a kernel returns -> why it failed."""


@functools.cache
def library() -> ctypes.CDLL:
    """Return the library of kernels, compiled if the cache does not have it; it is loaded once in a process.

    Raises:
        KernelsUnavailable: it cannot be compiled or loaded.
    """
    file, passing = library_file()
    try:
        return ctypes.CDLL(str(file))
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be loaded ({error}).") from error
    finally:
        if passing:
            file.unlink()


def compiled_call(
    name: str,
    numbers: Sequence[int],
    pointers: Sequence[Tensor],
    layer: LayerShape,
    shape: torch.Size,
    *,
    takes_added: bool = False,
) -> Run:
    """Return the call of a C kernel for one shape of inputs.

    A kernel's arguments are: numbers (long), arrays and the bias (pointers), for some the tensor to add (pointer), the
    range of the outputs (two floats), inputs, outputs (pointers), the number of threads (int).

    Raises:
        KernelsUnavailable: the kernels cannot be compiled or loaded.
    """
    call: Callable[..., int] = getattr(library(), name)
    added_types = [ctypes.c_void_p] * takes_added
    call.argtypes = [  # type: ignore[attr-defined]
        *[ctypes.c_long] * len(numbers),
        *[ctypes.c_void_p] * len(pointers),
        *added_types,
        *[ctypes.c_float] * 2,
        *[ctypes.c_void_p] * 2,
        ctypes.c_int,
    ]
    fixed = (*map(ctypes.c_long, numbers), *(ctypes.c_void_p(each.data_ptr()) for each in pointers))
    limits: tuple[Any, ...] = (ctypes.c_float(layer.low), ctypes.c_float(layer.high))
    outputs = layer.output(shape)

    def run(x: Tensor, added: Tensor | None) -> Tensor:
        y = torch.empty(outputs, dtype=torch.float32)
        more = (added if added is None else added.data_ptr(),) if takes_added else ()
        code = call(*fixed, *more, *limits, x.data_ptr(), y.data_ptr(), torch.get_num_threads())
        if code:
            raise (MemoryError if code == 1 else RuntimeError)(f"a sparse kernel failed: {REASONS[code]}.")
        return y

    return run


def linear_call(
    name: str, numbers: Sequence[int], arrays: Sequence[Tensor], bias: Tensor, layer: LayerShape, shape: torch.Size
) -> Run:
    """Return the call of a kernel of linear layers, whose first numbers are examples, inputs and outputs."""
    sizes = (layer.examples(shape), layer.inputs, layer.outputs)
    return compiled_call(name, (*sizes, *numbers), (*arrays, bias), layer, shape)
