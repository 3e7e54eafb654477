"""Peak memory of a network with its weights while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

PEAK = "5"
"""Value for /proc/self/clear_refs that resets the kernel's peak of a process's resident memory."""
CALLS = 3


def peak_memory(
    make: Callable[[], Callable[[], object]], device: torch.device | None = None, *, proc: Path = Path("/proc/self")
) -> int | None:
    """Return the peak growth of this process's memory, in bytes, while a function is built and called.

        peak_memory(calling(network, images))           # weights, and activations that exist at the same time

    On the CPU the measure is resident memory of all threads, as Linux counts it: nothing else may run in the process
    meanwhile. Memory that the process freed earlier is returned to the system first.

    Args:
        make: builds the function with all its memory, as for `compare_latency`.
        device: for a GPU, memory that torch allocates there is measured instead.
        proc: folder where the kernel describes this process.

    Returns:
        bytes; None if the system does not report its memory.
    """
    gc.collect()
    if device is not None and device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        _called(make)
        return torch.cuda.max_memory_allocated(device) - before
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    try:
        (proc / "clear_refs").write_text(PEAK)
        before = _resident(proc, "VmRSS")
        _called(make)
        return max(0, _resident(proc, "VmHWM") - before)
    except (OSError, ValueError):
        return None


def _called(make: Callable[[], Callable[[], object]]) -> None:
    call = make()
    for _ in range(CALLS):
        call()


def _resident(proc: Path, field: str) -> int:
    found = re.search(rf"^{field}:\s+(\d+) kB$", (proc / "status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(field)
    return 1024 * int(found[1])
