"""Memory for large masks, and for what they leave: its pages cost more than the rest.

Later rounds overwrite the mask and the masked tensor of the round before where nobody else can see them (`is_free`).
The first round needs new memory, and for masks of whole channels or few entries its kind matters.

Linux hands out 4 KiB a page fault, but 2 MiB to a program that asks for them: 40 MB are touched in 3 ms, not in 14.
NumPy asks, torch does not, so such tensors are made of memory that NumPy has allocated. They are like any other, except
that their storage cannot be resized.

Masks that all entries are ranked or drawn for stay torch's own. Faults are a lesser part of their time, and a virtual
machine that gives free memory back to its host (free page reporting) gives back large pages first: 100 ms to get them
again, now and then.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

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


def is_free(holder: Mapping[str, Any], name: str, *, others: int = 0) -> bool:
    """Say whether `holder[name]` is a large tensor that nobody but `holder` can see, so that it may be overwritten.

    To be asked of tensors whose memory is known to be torch's or ours: an array that lends its own is not counted.

    Args:
        holder: what holds it under `name`, say the buffers of a module.
        name: the key.
        others: references from Python that the caller knows of, besides that of `holder`.
    """
    tensor = holder.get(name)
    if _ALONE is None or not isinstance(tensor, Tensor) or not is_large(tensor) or tensor.is_inference():
        return False
    shared = tensor.untyped_storage().is_shared()  # with another process
    del tensor
    return not shared and _holders(holder, name) == (_ALONE[0] + others, *_ALONE[1:])


def _holders(holder: Mapping[str, Any], name: str) -> tuple[int, ...]:
    """Count what holds `holder[name]`: Python's names, histories of operations, and the same of its memory."""
    references = sys.getrefcount(holder[name])  # before there is a variable
    tensor = holder[name]
    storage = tensor.untyped_storage()
    return references, tensor._use_count(), sys.getrefcount(storage), torch._C._storage_Use_Count(storage._cdata)


_ALONE = _holders({"": torch.empty(1, device="cpu")}, "") if hasattr(Tensor, "_use_count") else None


def same(tensor: Tensor) -> Tensor:
    """Return a new tensor, without a history, that is the memory of `tensor` as it is laid out."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())


def _large_like(tensor: Tensor, *, zero: bool) -> Tensor:
    held = (np.zeros if zero else np.empty)(tensor.numel() * tensor.element_size() + ALIGNMENT, np.uint8)
    start = -held.ctypes.data % ALIGNMENT
    storage = torch.from_numpy(held[start : held.size - ALIGNMENT + start]).untyped_storage()
    strides = torch.empty_like(tensor, device="meta").stride()  # those that torch would choose
    return torch.empty(0, dtype=tensor.dtype, device="cpu").set_(storage, 0, tensor.shape, strides)
