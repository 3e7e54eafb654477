"""How much memory a network takes, with its weights, while it runs."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch

PEAK = "5"
"""What is written to `clear_refs` to have the kernel begin its peak of a process's memory anew."""
CALLS = 3


def peak_memory(
    make: Callable[[], Callable[[], object]], device: torch.device | None = None, *, proc: Path = Path("/proc/self")
) -> int | None:
    """Return the bytes by which this process's memory grows at most while something is made and called.

        peak_memory(calling(network, images))           # weights, and what lives at once of what it computes

    On the CPU it is resident memory, as Linux counts it, of all threads: nothing else may run in the process meanwhile.
    Memory that the process has freed is given back to the system before.

    Args:
        make: makes it, with all that it holds, as `compare_latency` takes it.
        device: a GPU counts what torch holds there.
        proc: what the kernel says of this process.

    Returns:
        bytes; None where the system does not say them.
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
