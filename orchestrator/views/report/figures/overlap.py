"""How many of the weights that two methods keep are the same: masks, read from the store and compared."""

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
"""Entries of all masks that are compared: a byte each, and while one is read some more."""

ReadFile = Callable[[str, str], bytes]
"""Stage key and name of a file -> its content."""


def overlap_of(records: Mapping[str, StageRecord], comparison: Comparison, read: ReadFile) -> tuple[Matrix, ...]:
    """Return a matrix for each panel in which masks of two methods, for networks of one shape, can be read."""
    masks = _masks(records, read, by_method.overlapping(comparison))
    return by_method.overlap(comparison, masks, lambda one, other: _shared(masks[one], masks[other]))


def _masks(records: Mapping[str, StageRecord], read: ReadFile, keys: Iterable[str]) -> Mapping[str, Masks]:
    """Return the masks of these stages; where some cannot be read, or would fill the memory, say so and do without."""
    readable: dict[str, Masks] = {}
    room = MOST
    for key in keys:
        entries = records[key].prunable_parameters
        try:
            if entries > room:
                raise ValueError(f"The figure holds at most {MOST} entries of masks.")
            room -= entries
            readable[key] = masks_in(read(key, MASKS), records[key])
        except (OrchestratorError, OSError, ValueError) as error:
            _LOGGER.warning("The overlap of masks is shown without stage %s: %s", key[:12], error)
    return readable


def _shared(one: Masks, other: Masks) -> tuple[float, float] | None:
    """Return what fraction of the entries that two networks keep both keep; None for networks of other shapes.

    The second is what it would be by chance, with as many entries kept of each tensor.
    """
    if {name: mask.shape for name, mask in one.items()} != {name: mask.shape for name, mask in other.items()}:
        return None
    counts = [(int(mask.sum()), int(other[name].sum()), mask.size) for name, mask in one.items()]
    kept = sum(a + b for a, b, _ in counts) / 2
    both = sum(int((mask & other[name]).sum()) for name, mask in one.items())
    by_chance = sum(a * b / size for a, b, size in counts if size)
    return (both / kept, by_chance / kept) if kept else (1.0, 1.0)
