"""Derived seeds, and a context manager that seeds the global random generators."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def derive(seed: int, purpose: str) -> int:
    """Derive a seed in [0, 2^63) for `purpose`, so that draws for different purposes are independent."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{purpose}".encode()).digest()[:8]) >> 1


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators that `seeded` covers, for good."""
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU, and `device` if CUDA); restore them on exit.

    Initialisation, dropout and custom transforms use only the global generators.
    """
    cuda = [device] if device is not None and device.type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 (the global state is the point)
    with torch.random.fork_rng(devices=cuda):
        reseed(seed, device)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
