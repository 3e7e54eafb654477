"""What computes here, by name: read from the system, so that nothing is imported to find it out."""

from __future__ import annotations

import platform
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def processor_model() -> str:
    """Return the model of this machine's processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if named:
            return named[0]
    return platform.processor() or platform.machine()


@cache
def gpu_models() -> tuple[str, ...]:
    """Return the models of this machine's GPUs, as the driver's own tool names them; none where it is not there."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(name.strip() for name in told.splitlines() if name.strip())
