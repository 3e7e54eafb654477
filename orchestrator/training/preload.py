"""Modules that a worker process imports while Ray starts: the stages, and the imports of torch's first optimizer.

The garbage collector is off during the imports: imported objects are never released, and scanning them again and again
takes a fifth of the import time. Later collections skip these objects, too.
"""

from __future__ import annotations

import gc
from importlib import import_module

from orchestrator.config.config_groups import OF_STAGES

BUILT_IN = dict.fromkeys(
    row.code.partition(":")[0] for group in OF_STAGES.values() for row in group.rows.values() if row.code
)
"""Modules that catalogue rows name as their code and import late; optional libraries are imported later still."""
MODULES = ("orchestrator.training.training_stages", *BUILT_IN, "torch._dynamo")


def _load() -> None:
    gc.disable()
    try:
        for name in MODULES:
            import_module(name)
    finally:
        gc.enable()
    gc.freeze()


_load()
