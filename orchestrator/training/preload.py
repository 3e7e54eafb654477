"""What a worker process imports while Ray starts: the work, and what torch's first optimizer would import in a step.

The garbage collector is off meanwhile: it would look again and again through what imports leave for good, which takes
a fifth of their time; nor does it look through that later.
"""

from __future__ import annotations

import gc
from importlib import import_module

from orchestrator.config.config_groups import GROUPS

BUILT_IN = dict.fromkeys(
    row.code.partition(":")[0] for group in GROUPS.values() for row in group.rows.values() if row.code
)
"""Modules of what is built in: rows name their code, and import it late; libraries that few have are imported later."""
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
