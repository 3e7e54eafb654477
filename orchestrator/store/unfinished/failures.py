"""Remembered failures of stages that would fail the same way again: one file for each stage, safe to delete."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from orchestrator.core.file_names import component
from orchestrator.core.plain_data import read_as
from orchestrator.core.work_order import PastFailure
from orchestrator.store.backends import Backend
from orchestrator.store.sealed_json import seal, unseal

FOLDER = "failures"


class Failures:
    """Failures in a backend: ROOT/failures/KEY, sealed with its own digest."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def save(self, key: str, failure: PastFailure) -> None:
        """Save how a stage failed, replacing an earlier failure; raise StoreError if it cannot be written."""
        self._backend.write(_path(key), seal(asdict(failure)))

    def of(self, key: str) -> PastFailure | None:
        """Return how a stage failed; None if no failure is saved, or it cannot be read.

        Raises:
            StoreError: the store is unreachable
        """
        try:
            found: PastFailure = read_as(PastFailure, unseal(self._backend.read(_path(key))))
        except (FileNotFoundError, ValueError):
            return None
        return found

    def known(self) -> list[str]:
        """Return the keys of the stages that have a saved failure."""
        return self._backend.names(FOLDER)

    def drop(self, key: str) -> None:
        """Remove the failure of a stage, if there is one."""
        self._backend.remove(_path(key))

    def drop_all(self, keys: Iterable[str]) -> None:
        """Remove the failures of those of `keys` that have one."""
        for key in set(self.known()).intersection(keys):
            self.drop(key)


def _path(key: str) -> str:
    return f"{FOLDER}/{component(key, 'key')}"
