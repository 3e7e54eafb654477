"""What a worker process imports while Ray starts: the work, and what torch's first optimizer would import in a step.

The garbage collector is off meanwhile: it would look again and again through what imports leave for good, which takes
a fifth of their time; nor does it look through that later.
"""

from __future__ import annotations

import gc
from importlib import import_module

MODULES = ("orchestrator.training.stages", "torch._dynamo")


def _load() -> None:
    gc.disable()
    try:
        for name in MODULES:
            import_module(name)
    finally:
        gc.enable()
    gc.freeze()


_load()
