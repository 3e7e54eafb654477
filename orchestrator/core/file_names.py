"""Names of the files that several rooms read or write, and a check for safe path components."""

from __future__ import annotations

import re

from orchestrator.core.errors import StoreError
from orchestrator.core.plain_data import quoted

WEIGHTS = "weights.safetensors"
"""Parameters and buffers at the end of a stage."""

MASKS = "masks.npz"
"""Bit-packed masks of a round."""

STATE, STATE_VALUES = "state.safetensors", "state.json"
"""Training state: the result of a stage that ends at a step of a training."""

DROPPABLE = (WEIGHTS, STATE)
"""Files that retention drops together from a finished stage; masks and records stay."""

RECORD = "record.json"
"""Record of a stage; its existence commits the stage."""

METRICS_FILE, NOTE_FILE = "comparison/metrics.json", "comparison/README.md"
"""Files of a report that MLflow's parent run also shows as its metrics and its description."""

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,+-]{0,199}")


def is_component(value: str) -> bool:
    """Whether `value` is safe as one component of a path."""
    return _COMPONENT.fullmatch(value) is not None


def component(value: str, argument: str) -> str:
    """Return `value` if it is safe as one component of a path.

    Args:
        value: the component.
        argument: the name of the argument, for the error.

    Raises:
        StoreError: `value` could lead out of the store's root.
    """
    if not is_component(value):
        raise StoreError(
            f"`{argument}` (={quoted(value)}) must be 1 to 200 letters, digits or any of . _ = , + -, and must "
            "begin with a letter, a digit or _; rename it"
        )
    return value
