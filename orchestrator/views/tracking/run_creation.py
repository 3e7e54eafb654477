"""Right to create the runs of a sweep's view, which only one of the drivers that share a store has at a time.

MLflow allows any number of runs with the same tags: two drivers that both look and find no run would both create one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from orchestrator.core.errors import StoreError
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.store.leases import Leases


class CreatedElsewhere(Exception):
    """Another driver is creating runs of the sweep; search for them again later."""


class Creating:
    """Driver's right to create the runs of one view, as a lease in the store.

    Without leases, or if the store cannot be written, the right is always granted, and duplicate runs are withdrawn
    later.

    Args:
        leases: function that makes this driver's leases; None if no store is shared
        view: identity of the view: MLflow's address, experiment, sweep
    """

    def __init__(self, leases: Callable[[], Leases] | None, *view: str) -> None:
        self._make, self._key = leases, digest(canonical_json(["view", *view]))
        self._leases: Leases | None = None

    def take(self) -> bool:
        """Acquire or keep the right; return whether this driver has it."""
        if self._make is None:
            return True
        try:
            if self._leases is None:
                self._leases = self._make().__enter__()
            return self._leases.acquire(self._key)
        except StoreError:
            return True

    def give_back(self) -> None:
        """Release the right."""
        if self._leases is not None:
            with suppress(StoreError):
                self._leases.close()
            self._leases = None
