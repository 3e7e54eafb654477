"""Environment of a stage: the entries that its result may depend on."""

from __future__ import annotations

import platform

import numpy
import torch

import orchestrator
from orchestrator.planning.hardware import processor_model

DECIDING = ("processor", "torch", "numpy")
"""Environment entries that affect the bits of results."""


def environment(device: str = "cpu") -> dict[str, str]:
    """Return the versions and the hardware that results may depend on; for a GPU, its name."""
    return {
        "python": platform.python_version(),
        "processor": processor(),
        **_gpu(device),
        "torch": str(torch.__version__),  # a plain str: to read torch's own class, a driver would import torch
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "orchestrator": orchestrator.__version__,
    }


def deciding(device: str) -> dict[str, str]:
    """Return the environment entries on which the bits of a stage, and so its failure, depend besides its key."""
    found = {name: value for name, value in environment().items() if name in (*DECIDING, "orchestrator")}
    return found | _gpu(device)


def processor() -> str:
    """Return the processor's model and the instructions torch uses; results are bit-equal on processors of one kind."""
    return f"{processor_model()}, {torch.backends.cpu.get_cpu_capability()}"


def _gpu(device: str) -> dict[str, str]:
    return {"gpu": torch.cuda.get_device_name(device)} if device.startswith("cuda") else {}
