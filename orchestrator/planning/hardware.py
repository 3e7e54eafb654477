"""Names of this machine's processor and GPUs, read from the system without importing torch."""

from __future__ import annotations

import glob
import os
import platform
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

DEVICE_FILES = ("/dev/nvidia[0-9]*", "/proc/driver/nvidia/gpus/*", "/dev/nvhost-gpu", "/dev/dxg", "/dev/kfd")
"""Patterns of the files that a GPU has on Linux: NVIDIA, Jetson, WSL, AMD."""


@cache
def processor_model() -> str:
    """Return the model name of this machine's processor."""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        if named:
            return named[0]
    return platform.processor() or platform.machine()


@cache
def gpu_models() -> tuple[str, ...]:
    """Return the model names of this machine's GPUs from nvidia-smi; none if that tool is not installed."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(name.strip() for name in told.splitlines() if name.strip())


def lacks_gpu(environment: Mapping[str, str] = os.environ) -> str | None:
    """Return why this process certainly has no GPU; None if it may have one, as only torch knows for sure."""
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1"):
        return f"CUDA_VISIBLE_DEVICES (={visible!r}) hides all GPUs"
    if any(glob.glob(pattern) for pattern in DEVICE_FILES) or gpu_models():
        return None
    return "this machine has none"
