"""Every node proves that it sees the store, before a stage is trained there whose result would be lost."""

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
    """To be called on a node: proves that it sees what the driver wrote to the store, and can write."""

    store: Store
    token: str

    def __call__(self) -> None:
        """Look, and write.

        Raises:
            StoreError: this node does not see it, or cannot write; the message names the node and what to set
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
        """Where in the store the driver wrote."""
        return f"probes/{component(self.token, 'token')}"


@contextmanager
def probing(store: Store) -> Iterator[Probe]:
    """Write what nodes are to find in `store`, give the probe that looks for it, and remove it in the end."""
    probe = Probe(store, uuid.uuid4().hex)
    store.mark()
    store.backend.write(probe.path, probe.token.encode())
    try:
        yield probe
    finally:
        store.backend.remove(probe.path)
