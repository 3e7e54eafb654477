"""Probe that every node sees the store, before a stage is trained there and its result is lost."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import component
from orchestrator.core.redact import redact
from orchestrator.store.store import Store


@dataclass(frozen=True)
class Probe:
    """Callable for a node: checks that the node reads the driver's file in the store, and can write."""

    store: Store
    token: str

    def __call__(self) -> None:
        """Read the driver's file, and write an answer.

        Raises:
            StoreError: this node cannot read or write the store; the message names the node and the remedy
        """
        host, backend = socket.gethostname(), self.store.backend
        try:
            seen = backend.read(self.path) == self.token.encode()
            if seen:
                answer = f"{self.path}.{uuid.uuid4().hex}"
                backend.write(answer, host.encode())
                backend.remove(answer)
        except FileNotFoundError:
            seen = False
        except StoreError as error:
            raise StoreError(f"node {host}: {error}") from error
        if not seen:
            raise StoreError(
                f"node {host} does not see `store.uri` (={redact(self.store.uri)}) as the driver does; set `store.uri` "
                "to a directory that every node mounts at the same path, or to an object store (s3://bucket/prefix)"
            )

    @property
    def path(self) -> str:
        """Path of the driver's file in the store."""
        return f"probes/{component(self.token, 'token')}"


@contextmanager
def probing(store: Store) -> Iterator[Probe]:
    """Write a file to `store`, yield the probe that looks for it, and remove the file at the end."""
    probe = Probe(store, uuid.uuid4().hex)
    store.mark()
    store.backend.write(probe.path, probe.token.encode())
    try:
        yield probe
    finally:
        store.backend.remove(probe.path)
