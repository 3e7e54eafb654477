"""The right to create the runs of a sweep's view, which drivers that share a store have one at a time.

MLflow lets any number of runs have the same tags: two drivers that both look and find nothing would both create.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from orchestrator.core.errors import StoreError
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.store.leases import Leases


class CreatedElsewhere(Exception):
    """Another driver creates runs of the sweep now: look again later, they are likely there then."""


class Creating:
    """A driver's claim to create the runs of one view, by a lease in the store.

    Without the store's leases, or where the store cannot be written, the right is always given: doubles are withdrawn
    later.

    Args:
        leases: makes the leases of this driver; None where no store is shared
        view: what the runs belong to: MLflow's address, the experiment, the sweep
    """

    def __init__(self, leases: Callable[[], Leases] | None, *view: str) -> None:
        self._make, self._key = leases, digest(canonical_json(["view", *view]))
        self._leases: Leases | None = None

    def take(self) -> bool:
        """Take the right, or keep it; return whether this driver has it."""
        if self._make is None:
            return True
        try:
            if self._leases is None:
                self._leases = self._make().__enter__()
            return self._leases.acquire(self._key)
        except StoreError:
            return True

    def give_back(self) -> None:
        """Give the right to whoever asks next."""
        if self._leases is not None:
            with suppress(StoreError):
                self._leases.close()
            self._leases = None
