"""The compiled kernels, as C functions of one signature."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pruning.kernels.compiling import KernelsUnavailable, checked, library_file
from pruning.kernels.sparse_weight import LayerShape

REASONS = {1: "not enough memory", 2: "the input is too large for 32-bit positions"}
"""Code that a kernel returns -> why it failed."""


_LOADING = threading.Lock()


def library() -> ctypes.CDLL:
    """Return the library of kernels, compiled if the cache does not have it; it is loaded once in a process.

    Raises:
        KernelsUnavailable: it cannot be compiled or loaded.
    """
    with _LOADING:  # threads wait for the first one's compiler
        return _loaded()


@functools.cache
def _loaded() -> ctypes.CDLL:
    for anew in (False, True):
        file, passing = library_file(anew)
        try:
            return _load(file, passing)
        except OSError as error:
            if passing or anew:
                raise KernelsUnavailable(f"the compiled kernels cannot be loaded ({error}).") from error
        file.unlink(missing_ok=True)  # not a library, although its content has the digest of its name
    raise AssertionError("the second attempt returns or raises")


def _load(file: Path, passing: bool) -> ctypes.CDLL:
    """Load a library: one of this process alone, which is then deleted, or the file of the cache that is checked."""
    if passing:
        try:
            return ctypes.CDLL(str(file))
        finally:
            file.unlink()
    descriptor = checked(file)
    if descriptor is None:
        raise OSError(f"{file} was changed")
    same = Path("/proc/self/fd", str(descriptor))
    try:
        return ctypes.CDLL(str(same if same.exists() else file))  # the descriptor stays open: it is the library's name
    except OSError:
        os.close(descriptor)
        raise


class _Call(ctypes.Structure):
    """The struct `Call` of `sources/vectors.h`."""

    _fields_ = (
        ("numbers", ctypes.c_int64 * 8),
        ("arrays", ctypes.c_void_p * 12),
        ("low", ctypes.c_float),
        ("high", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, eq=False)
class CompiledCall:
    """A `Run` of a C kernel for one shape of inputs; it keeps the arrays alive.

    Args:
        kernel: the C function.
        address: where its struct `Call` is.
        like: a tensor of the outputs' shape and dtype, with the memory of one element.
        held: what the struct points to.
    """

    kernel: Callable[..., int]
    address: int
    like: Tensor
    held: Any

    def __call__(self, x: Tensor, added: Tensor | None = None, more: Tensor | None = None) -> Tensor:
        """Return the outputs."""
        y = torch.empty_like(self.like)  # takes half as long as a shape and a dtype
        second = None if added is None else added.data_ptr()
        if more is not None:  # a kernel of three inputs takes the second and the third as an array
            second = (ctypes.c_void_p * 2)(second, more.data_ptr())  # type: ignore[assignment]
        check_code(self.kernel(self.address, x.data_ptr(), second, y.data_ptr(), torch.get_num_threads()))
        return y


def check_code(code: int) -> None:
    """Raise MemoryError or RuntimeError if a kernel returned a reason."""
    if code:
        raise (MemoryError if code == 1 else RuntimeError)(f"a sparse kernel failed: {REASONS[code]}.")


def compiled_call(
    name: str, numbers: Sequence[int], arrays: Sequence[Tensor], layer: LayerShape, shape: torch.Size
) -> CompiledCall:
    """Return the call of a C kernel for one shape of inputs.

    Raises:
        KernelsUnavailable: the kernels cannot be compiled or loaded.
    """
    kernel: Callable[..., int] = getattr(library(), name)
    kernel.argtypes = [*[ctypes.c_void_p] * 4, ctypes.c_int]  # type: ignore[attr-defined]
    pointers = (ctypes.c_void_p * 12)(*(each.data_ptr() for each in arrays))
    held = _Call((ctypes.c_int64 * 8)(*numbers), pointers, layer.low, layer.high)
    like = torch.empty((), dtype=layer.output_dtype, device="cpu").expand(layer.output(shape))
    return CompiledCall(kernel, ctypes.addressof(held), like, (held, arrays))


def linear_call(
    name: str, numbers: Sequence[int], arrays: Sequence[Tensor], bias: Tensor, layer: LayerShape, shape: torch.Size
) -> CompiledCall:
    """Return the call of a kernel of linear layers, whose first numbers are examples, inputs and outputs."""
    sizes = (layer.examples(shape), layer.inputs, layer.outputs)
    return compiled_call(name, (*sizes, *numbers), (*arrays, bias), layer, shape)
