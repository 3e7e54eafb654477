"""Every node proves that it sees the store, before a stage is trained there whose result would be lost."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.store.store import Store


@dataclass(frozen=True)
class Probe:
    """To be called on a node: raises `StoreError` unless it sees what the driver wrote to the store, and can write."""

    store: Store
    token: str

    def __call__(self) -> None:
        """Look, and write."""
        self.store.probe(self.token)


@contextmanager
def probing(store: Store) -> Iterator[Probe]:
    """Write what nodes are to find in `store`, give the probe that looks for it, and remove it in the end."""
    token = uuid.uuid4().hex
    store.write_probe(token)
    try:
        yield Probe(store, token)
    finally:
        store.remove_probe(token)
