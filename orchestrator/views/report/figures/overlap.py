"""Overlap of methods' masks, which are read from the store."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from orchestrator.compare.comparison import Comparison
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.file_names import MASKS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import logger
from orchestrator.store.finished.stage_contents import MOST_ENTRIES, masks_in
from orchestrator.views.report.figures import by_method
from orchestrator.views.report.figures.figure_data import Matrix

if TYPE_CHECKING:
    from orchestrator.store.finished.stage_contents import Masks

_LOGGER = logger("orchestrator")
MOST = MOST_ENTRIES
"""Maximum number of mask entries compared in all: one byte each, and more while a mask is read."""

ReadFile = Callable[[str, str], bytes]
"""Stage key and name of a file -> its content."""


def overlap_of(records: Mapping[str, StageRecord], comparison: Comparison, read: ReadFile) -> tuple[Matrix, ...]:
    """Return an overlap matrix for each panel with readable masks of two methods for networks of equal shapes."""
    masks = _masks(records, read, by_method.overlapping(comparison))
    return by_method.overlap(comparison, masks, lambda one, other: _shared(masks[one], masks[other]))


def _masks(records: Mapping[str, StageRecord], read: ReadFile, keys: Iterable[str]) -> Mapping[str, Masks]:
    """Return stage key -> masks; masks that cannot be read or exceed the limit are left out with a warning."""
    readable: dict[str, Masks] = {}
    room, beyond = MOST, 0
    for key in keys:
        entries = records[key].prunable_parameters
        if entries > room:
            beyond += 1
            continue
        room -= entries
        try:
            readable[key] = masks_in(read(key, MASKS), records[key])
        except (OrchestratorError, OSError, ValueError) as error:
            _LOGGER.warning("The overlap of masks is shown without stage %s: %s", key[:12], error)
    if beyond:
        _LOGGER.warning(
            "The overlap of masks is shown without %d of the networks: the figure compares at most %d entries of "
            "masks.",
            beyond,
            MOST,
        )
    return readable


def _shared(one: Masks, other: Masks) -> tuple[float, float] | None:
    """Return the fraction of kept entries that two networks have in common, and by chance; None for unequal shapes.

    common = |A and B| / ((|A| + |B|) / 2)

    The value by chance has equally many kept entries in each tensor.
    """
    if {name: mask.shape for name, mask in one.items()} != {name: mask.shape for name, mask in other.items()}:
        return None
    counts = [(int(mask.sum()), int(other[name].sum()), mask.size) for name, mask in one.items()]
    kept = sum(a + b for a, b, _ in counts) / 2
    both = sum(int((mask & other[name]).sum()) for name, mask in one.items())
    by_chance = sum(a * b / size for a, b, size in counts if size)
    return (both / kept, by_chance / kept) if kept else (1.0, 1.0)
