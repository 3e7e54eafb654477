"""Leases keep drivers that share a store from training the same stage at the same time.

    leases/owners/OWNER.json      heartbeat of a driver; one file, however many leases it holds
    leases/owners/OWNER.dead      voids the driver's leases; written by the first driver that notices its death
    leases/stages/KEY             names the owner of a stage; created, never overwritten
    leases/stages/KEY@OWNER       names the driver that took the stage over from OWNER, who is dead

A driver takes a stage over by creating a new file whose name holds the dead owner, so only one of several drivers
succeeds. Names of owners are never used twice. Leases save work; safety does not depend on them, since a store accepts
one commit for each stage. Two drivers may train a stage at once if the store has no conditional write (see
`ObjectBackend`), or if a driver was stopped for longer than a lease lasts and then continues.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import component
from orchestrator.core.plain_data import Count, Seconds, canonical_json, digest, parse_json, read_as
from orchestrator.core.redact import logger
from orchestrator.store.backends import Backend

LEASE_SECONDS = 60.0
"""Seconds after its last heartbeat during which a driver counts as alive. Clocks may differ by half of this time."""

_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

_log = logger(__name__)


class Leases:
    """Leases of one driver on the stages of a store. Use it as a context manager, which sends the heartbeats.

    Args:
        backend: where the store's bytes lie
        owner: name of this driver for others; by default its host and process number
        ttl: seconds after its last heartbeat at which an owner counts as dead; on the same machine a dead process is
            noticed at once
        clock: returns the time in Unix seconds
    """

    def __init__(self, backend: Backend, owner: str, ttl: float, clock: Callable[[], float]) -> None:
        self._backend, self._ttl, self._clock = backend, ttl, clock
        self._label = re.sub(r"[^A-Za-z0-9._-]+", "-", owner or f"{socket.gethostname()}-{os.getpid()}").strip(".-")
        self._lock = threading.Lock()
        self._held: dict[str, str] = {}
        self._dead: set[str] = set()
        self._seen: dict[str, tuple[float | None, float]] = {}
        self._checked: dict[str, float] = {}
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat_until_ended, name="lease-heartbeat", daemon=True)
        self.owner = self._new_owner()

    def __enter__(self) -> Self:
        self.beat()
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def acquire(self, key: str) -> bool:
        """Try to take the lease of a stage; return whether this driver holds it now.

        Look up the stage in the store afterwards: the previous owner may have committed it.
        """
        path, dead = _stage_path(key), set[str]()
        while not self._backend.create(path, self.owner.encode()):
            holder = self._named(path)
            if holder == self.owner:
                break
            if holder is not None:
                if self._alive(holder):
                    return False
                self._bury(holder)
                path = self._taken_over(key, holder, dead)
        with self._lock:
            self._held[key] = path
        return True

    def holder(self, key: str) -> str | None:
        """Return the live owner of a stage's lease, or None."""
        path, dead = _stage_path(key), set[str]()
        while (holder := self._named(path)) is not None:
            if self._alive(holder):
                return holder
            path = self._taken_over(key, holder, dead)
        return None

    def release(self, key: str) -> None:
        """Release a lease; do nothing if it was never held, or may belong to another driver by now."""
        with self._lock:
            path = self._held.pop(key, None)
        if path is not None and not self._buried(self.owner):
            self._backend.remove(path)

    def beat(self) -> None:
        """Write this driver's heartbeat. A driver that was taken for dead gets a new name and loses its leases."""
        if self._buried(self.owner):
            with self._lock:
                lost, self._held = len(self._held), {}
                self.owner = self._new_owner()
            _log.warning("this driver was taken for dead, and %d of its stages may have been handed to others", lost)
        beat = {"beat": self._clock(), "machine": _machine(), "pid": os.getpid(), "born": _born(os.getpid())}
        self._backend.write(_owner_path(self.owner), canonical_json(beat).encode())

    def close(self) -> None:
        """Stop the heartbeats and release every lease; if the store is unreachable, the leases expire by themselves."""
        self._ended.set()
        if self._heart.is_alive():
            self._heart.join()
        with suppress(StoreError):
            for key in list(self._held):
                self.release(key)
            self._backend.remove(_owner_path(self.owner))

    def _beat_until_ended(self) -> None:
        while not self._ended.wait(self._ttl / 4):
            try:
                self.beat()
            except StoreError as error:
                _log.warning("the lease of this driver could not be renewed: %s", error)

    def _new_owner(self) -> str:
        return f"{self._label[:100] or 'driver'}-{uuid.uuid4().hex[:12]}"

    def _named(self, path: str) -> str | None:
        """Return the owner named in a file, or None; an invalid name is replaced by its digest, which no driver has."""
        try:
            name = self._backend.read(path).decode(errors="replace")
        except FileNotFoundError:
            return None
        return name if _OWNER.fullmatch(name) else digest(name)

    def _taken_over(self, key: str, holder: str, dead: set[str]) -> str:
        """Return the path that names who took a stage over from `holder`, and add `holder` to `dead`."""
        if holder in dead:
            raise StoreError(f"the leases of stage {key} name each other in a circle; remove {_stage_path(key)}*")
        dead.add(holder)
        return f"{_stage_path(key)}@{holder}"

    def _alive(self, owner: str) -> bool:
        """Return whether an owner is alive; its heartbeat is read at most ten times within `ttl` seconds."""
        if owner == self.owner:
            return True
        now = self._clock()
        if owner in self._dead or 0 <= now - self._checked.get(owner, -self._ttl) < self._ttl / 10:
            return owner not in self._dead
        beat = self._heartbeat(owner)
        if beat is None or self._stopped(owner, beat, now) or self._buried(owner):
            self._dead.add(owner)
            return False
        self._checked[owner] = now
        return True

    def _heartbeat(self, owner: str) -> dict[str, Any] | None:
        """Return an owner's last heartbeat; {} if it cannot be read, None if there is none."""
        try:
            beat: dict[str, Any] = parse_json(self._backend.read(_owner_path(owner)))
            read_as(Seconds, beat["beat"])
            read_as(Count, beat["pid"])
        except FileNotFoundError:
            return None
        except (ValueError, LookupError, TypeError, StoreError):
            return {}
        return beat

    def _stopped(self, owner: str, beat: dict[str, Any], now: float) -> bool:
        """Whether an owner's process has ended, its last beat is older than `ttl`, or no new beat came for that time.

        The last rule covers owners whose clock is ahead, as their beats never look old, and beats that cannot be read.
        """
        if beat.get("machine") == _machine() and beat.get("born") != _born(beat["pid"]):
            return True
        when: float | None = beat.get("beat")
        last, since = self._seen.get(owner, (when, now))
        self._seen[owner] = (when, since if last == when else now)
        return now - self._seen[owner][1] > self._ttl or (when is not None and now - when > self._ttl)

    def _buried(self, owner: str) -> bool:
        return self._named(_grave_path(owner)) is not None

    def _bury(self, owner: str) -> None:
        self._backend.create(_grave_path(owner), self.owner.encode())


def _stage_path(key: str) -> str:
    return f"leases/stages/{component(key, 'key')}"


def _owner_path(owner: str) -> str:
    return f"leases/owners/{owner}.json"


def _grave_path(owner: str) -> str:
    return f"leases/owners/{owner}.dead"


def _machine() -> str:
    """Return a name for the scope in which process numbers are unique: a boot of a host and a container on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.uuid4().hex}"  # unknown scope: only the heartbeat decides


def _born(pid: int) -> str | None:
    """Return the start time of a process in clock ticks since boot, which tells reused process numbers apart."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rsplit(")", 1)[1].split()
            return None if state in "ZX" else fields[18]  # a zombie no longer trains
    except (OSError, IndexError):
        return None
