"""Names of files that several rooms read or write, and which names are safe."""

from __future__ import annotations

import re

from orchestrator.core.errors import StoreError
from orchestrator.core.plain_data import quoted

WEIGHTS = "weights.safetensors"
"""The parameters and buffers that a stage has ended with."""

MASKS = "masks.npz"
"""The bit-packed masks of a round."""

STATE, STATE_VALUES = "state.safetensors", "state.json"
"""Where a training is: the result of a stage that ends at a step of it."""

DROPPABLE = (WEIGHTS, STATE)
"""What may be dropped from a finished stage, all at once; masks and records stay."""

RECORD = "record.json"
"""The commit of a stage."""

METRICS_FILE, NOTE_FILE = "comparison/metrics.json", "comparison/README.md"
"""Files of a report that the parent run also shows as its metrics and its description."""

_COMPONENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=,+-]{0,199}")


def is_component(value: str) -> bool:
    """Say whether `value` is safe as one part of a path."""
    return _COMPONENT.fullmatch(value) is not None


def component(value: str, argument: str) -> str:
    """Return `value` if it is safe as one part of a path, else raise StoreError: nothing leaves the store's root."""
    if not is_component(value):
        raise StoreError(
            f"`{argument}` (={quoted(value)}) must be 1 to 200 letters, digits or any of . _ = , + - and not begin "
            "with a sign; rename it"
        )
    return value
