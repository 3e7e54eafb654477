"""Where a stage runs, as far as its result may depend on it."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy
import torch

import orchestrator

DECIDING = ("processor", "torch", "numpy")
"""Of an environment, what bits depend on."""


def environment() -> dict[str, str]:
    """Return the versions that results may depend on."""
    return {
        "python": platform.python_version(),
        "processor": processor(),
        "torch": str(torch.__version__),  # not a class of torch's, which a driver would import to read it
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "orchestrator": orchestrator.__version__,
    }


def deciding(device: str) -> dict[str, str]:
    """Return what the bits, and so the failure, of a stage on `device` depend on beside its key."""
    found = {name: value for name, value in environment().items() if name in (*DECIDING, "orchestrator")}
    return found | ({"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {})


@cache
def processor() -> str:
    """Return the model of the processor and what torch uses of it: results are bit-equal on processors of one kind."""
    model = platform.processor() or platform.machine()
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), model)
    return f"{model}, {torch.backends.cpu.get_cpu_capability()}"
