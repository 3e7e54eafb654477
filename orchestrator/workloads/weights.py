"""Weights as a file and as a digest: tensor by tensor, so that no second copy of them is ever in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from pruning import is_pruned

PIECE = 4 * 2**20
"""Bytes of a tensor that are brought to the CPU at a time."""


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model` as if it had never been pruned: masked weights under their own names.

    The tensors are those of the model where nothing masks them, and change with it.
    """
    state = model.state_dict()
    plain: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name in [key.removesuffix("_orig") for key in dict(module.named_parameters(recurse=False))]:
            path = f"{prefix}.{name}" if prefix else name
            if f"{path}_mask" in state and f"{path}_orig" in state and is_pruned(module):
                plain[path] = state.pop(f"{path}_orig") * state.pop(f"{path}_mask")
    plain.update(state)
    return {name: plain[name].detach() for name in sorted(plain)}


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for piece in _pieces(tensor):
            found.update(piece)
    return found.hexdigest()


def write_state(state: Mapping[str, Tensor], file: BinaryIO) -> None:
    """Write the file that `safetensors.torch.save` would make of contiguous copies of the tensors on the CPU.

    The package orders the tensors and names their dtypes, in the header it makes of empty ones; shapes and places are
    filled in here. A header is its length in 8 bytes, then JSON padded with spaces to a multiple of 8.
    """
    empty = save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in state.items()})
    header, place = json.loads(empty[8:]), 0
    for name, entry in header.items():
        end = place + state[name].nbytes
        entry.update(shape=list(state[name].shape), data_offsets=[place, end])
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in header:
        for piece in _pieces(state[name]):
            file.write(piece)


def load_state(model: nn.Module, path: Path) -> None:
    """Copy a file of weights into a plain model; the file is mapped, so that its pages are the system's to drop."""
    model.load_state_dict(load_file(path))


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, copying at most `PIECE` of them, or one row, at a time."""
    rows = tensor.detach()
    if rows.is_contiguous():
        rows = rows.flatten()
    count = max(1, PIECE // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), count):
        yield rows[start : start + count].cpu().contiguous().flatten().view(torch.uint8).numpy().data
