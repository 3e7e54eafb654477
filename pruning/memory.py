"""Memory for large masks of whole channels or few entries, and for what they leave: its pages cost more than the rest.

Linux hands out 4 KiB a page fault, but 2 MiB to a program that asks for them: 40 MB are touched in 3 ms, not in 14.
NumPy asks, torch does not, so such tensors are made of memory that NumPy has allocated. They are like any other, except
that their storage cannot be resized.

Masks that all entries are ranked or drawn for stay torch's own. Faults are a lesser part of their time, and a virtual
machine that gives free memory back to its host (free page reporting) gives back large pages first: 100 ms to get them
again, now and then.
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
    """Say whether tensors like `tensor` can be made here; subclasses make their own, as do other devices."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.device.type == "cpu"
        and tensor.layout == torch.strided
        and not tensor.is_complex()
        and tensor.nbytes >= LARGE
    )


def is_ours(tensor: Tensor) -> bool:
    """Say whether `tensor` was made here."""
    return is_large(tensor) and not tensor.untyped_storage().resizable()


def empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised tensor of the shape, strides and dtype of `tensor`."""
    return _large_like(tensor, zero=False) if is_large(tensor) else torch.empty_like(tensor.detach())


def zeros_like(tensor: Tensor) -> Tensor:
    """Return zeros of the shape, strides and dtype of `tensor`; large ones cost nothing until they are written."""
    return _large_like(tensor, zero=True) if is_large(tensor) else torch.zeros_like(tensor.detach())


def _large_like(tensor: Tensor, *, zero: bool) -> Tensor:
    held = (np.zeros if zero else np.empty)(tensor.numel() * tensor.element_size() + ALIGNMENT, np.uint8)
    start = -held.ctypes.data % ALIGNMENT
    storage = torch.from_numpy(held[start : held.size - ALIGNMENT + start]).untyped_storage()
    strides = torch.empty_like(tensor, device="meta").stride()  # those that torch would choose
    return torch.empty(0, dtype=tensor.dtype).set_(storage, 0, tensor.shape, strides)
