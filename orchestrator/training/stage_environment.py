"""Where a stage runs, as far as its result may depend on it."""

from __future__ import annotations

import platform

import numpy
import torch

import orchestrator
from orchestrator.planning.hardware import processor_model

DECIDING = ("processor", "torch", "numpy")
"""Of an environment, what bits depend on."""


def environment(device: str = "cpu") -> dict[str, str]:
    """Return the versions that results may depend on, and on what they are computed; of a GPU its name."""
    return {
        "python": platform.python_version(),
        "processor": processor(),
        **_gpu(device),
        "torch": str(torch.__version__),  # not a class of torch's, which a driver would import to read it
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "orchestrator": orchestrator.__version__,
    }


def deciding(device: str) -> dict[str, str]:
    """Return what the bits, and so the failure, of a stage on `device` depend on beside its key."""
    found = {name: value for name, value in environment().items() if name in (*DECIDING, "orchestrator")}
    return found | _gpu(device)


def processor() -> str:
    """Return the model of the processor and what torch uses of it: results are bit-equal on processors of one kind."""
    return f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}"


def _gpu(device: str) -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
