"""Activations in memory up to a limit, and in temporary files beyond it."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable, Sequence
from pathlib import Path

import torch
from torch import Tensor


class ActivationStore:
    """Lists of tensors by key.

    Args:
        limit: bytes that stay in memory; further lists go to files of a temporary folder. None: all stay.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit, self._bytes = limit, 0
        self._held: dict[Hashable, list[Tensor]] = {}
        self._files: dict[Hashable, Path] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def put(self, key: Hashable, tensors: Sequence[Tensor]) -> None:
        """Store a list of tensors in place of the key's earlier one."""
        self.drop(key)
        size = _bytes(tensors)
        if self._limit is None or self._bytes + size <= self._limit:
            self._held[key] = list(tensors)
            self._bytes += size
            return
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="activations-")
        self._files[key] = Path(self._folder.name) / f"{len(self._files)}-{abs(hash(key))}.pt"
        torch.save(list(tensors), self._files[key])

    def get(self, key: Hashable) -> list[Tensor]:
        """Return the tensors of a key."""
        if key in self._held:
            return self._held[key]
        found: list[Tensor] = torch.load(self._files[key], weights_only=True)
        return found

    def drop(self, key: Hashable) -> None:
        """Forget a key, if there is one."""
        self._bytes -= _bytes(self._held.pop(key, []))
        if key in self._files:
            self._files.pop(key).unlink()

    def close(self) -> None:
        """Forget all tensors, and delete the files."""
        self._held, self._files, self._bytes = {}, {}, 0
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _bytes(tensors: Sequence[Tensor]) -> int:
    sizes = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}
    return sum(sizes.values())
