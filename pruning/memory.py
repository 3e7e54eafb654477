"""Memory for large new masks and products: to touch 40 MB for the first time costs more than to compute them.

Linux hands out 4 KiB a page fault, but 2 MiB to a program that asks for them. NumPy asks, torch does not, so large
tensors on the CPU are made of memory that NumPy has allocated, which is filled four times as fast. They are like any
other tensor, except that their storage cannot be resized. All other tensors are torch's own.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

LARGE = 1 << 22
"""Bytes from which NumPy asks for large pages."""
ALIGNMENT = 64
"""Bytes, as for torch's own tensors."""


def is_large(tensor: Tensor) -> bool:
    """Say whether tensors like `tensor` are made here; subclasses make their own, as do other devices."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_complex()
        and tensor.nbytes >= LARGE
    )


def empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape, strides and dtype of `tensor`."""
    return _large_like(tensor, zero=False) if is_large(tensor) else torch.empty_like(tensor.detach())


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros of the shape, strides and dtype of `tensor`; large ones cost nothing until they are written."""
    return _large_like(tensor, zero=True) if is_large(tensor) else torch.zeros_like(tensor.detach())


def ones_like(tensor: Tensor) -> Tensor:
    """Return ones of the shape, strides and dtype of `tensor`."""
    return empty_like(tensor).fill_(1)


def copy_of(tensor: Tensor) -> Tensor:
    """Return a copy of the values of `tensor`."""
    return empty_like(tensor).copy_(tensor.detach())


def _large_like(tensor: Tensor, *, zero: bool) -> Tensor:
    held = (np.zeros if zero else np.empty)(tensor.numel() * tensor.element_size() + ALIGNMENT, np.uint8)
    start = -held.ctypes.data % ALIGNMENT
    storage = torch.from_numpy(held[start : held.size - ALIGNMENT + start]).untyped_storage()
    strides = torch.empty_like(tensor, device="meta").stride()  # those that torch would choose
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, strides)
