"""Leases: drivers that share a store never train the same stage at the same time.

    leases/owners/OWNER.json      one heartbeat a driver, whatever the number of its leases
    leases/owners/OWNER.dead      its leases are void: written by the first who finds that its heart has stopped
    leases/stages/KEY             names the owner of a stage; created, never overwritten
    leases/stages/KEY@OWNER       names who took the stage over from OWNER, who is dead

Taking over creates a new file that names the dead owner, so of many who try one succeeds; owners' names are never used
twice. A lease saves work and is not needed for safety: a store accepts one commit a stage whoever else trains it. Two
drivers may train a stage at once where the store has no conditional write (see `ObjectBackend`), or where a driver was
stopped for longer than a lease lasts and then goes on.
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
"""How long after its last heartbeat a driver counts as alive; the clocks of machines may differ by half of it."""

_OWNER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")

_log = logger(__name__)


class Leases:
    """The leases of one driver on the stages of a store. Use it as a context: within it the heart beats.

    Args:
        backend: where the store's bytes lie
        owner: what to call this driver to others; the default is its host and process
        ttl: seconds after its last heartbeat at which an owner counts as dead; on one machine a dead process is noticed
            at once
        clock: Unix seconds
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
        """Take the lease of a stage and say whether it is ours now; look in the store before using it."""
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
        """Return the living owner of a stage's lease, or None."""
        path, dead = _stage_path(key), set[str]()
        while (holder := self._named(path)) is not None:
            if self._alive(holder):
                return holder
            path = self._taken_over(key, holder, dead)
        return None

    def release(self, key: str) -> None:
        """Give a lease back; one that was never held, or may be another's by now, is left alone."""
        with self._lock:
            path = self._held.pop(key, None)
        if path is not None and not self._buried(self.owner):
            self._backend.remove(path)

    def beat(self) -> None:
        """Say that this driver is alive; one that was taken for dead goes on under a new name, without its leases."""
        if self._buried(self.owner):
            with self._lock:
                lost, self._held = len(self._held), {}
                self.owner = self._new_owner()
            _log.warning("this driver was taken for dead, and %d of its stages may have been handed to others", lost)
        beat = {"beat": self._clock(), "machine": _machine(), "pid": os.getpid(), "born": _born(os.getpid())}
        self._backend.write(_owner_path(self.owner), canonical_json(beat).encode())

    def close(self) -> None:
        """Stop the heart and give every lease back; where the store is away, they lapse by themselves."""
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
        """Return the owner that a file names, or None; what is no owner's name becomes the safe name of nobody."""
        try:
            name = self._backend.read(path).decode(errors="replace")
        except FileNotFoundError:
            return None
        return name if _OWNER.fullmatch(name) else digest(name)

    def _taken_over(self, key: str, holder: str, dead: set[str]) -> str:
        """Return the file that says who took a stage over from `holder`, who joins the `dead`."""
        if holder in dead:
            raise StoreError(f"the leases of {key} go round in a circle: remove {_stage_path(key)}*")
        dead.add(holder)
        return f"{_stage_path(key)}@{holder}"

    def _alive(self, owner: str) -> bool:
        """Look at an owner's heartbeat, at most ten times in the life of a lease."""
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
        """Return an owner's last heartbeat; one that cannot be read is empty, one that is not there is None."""
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
        """Whether the process is gone, its last beat too old, or none was seen or could be read for as long.

        No new beat is seen, and yet none is too old, where the owner's clock is ahead.
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
    """Name the set of processes in which a process number means something: a boot of a host, and a container on it."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{socket.gethostname()} {uuid.uuid4().hex}"  # nothing to tell by: only the heartbeat counts


def _born(pid: int) -> str | None:
    """Return when a process started, in clock ticks since boot: a number that was given to another process differs."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            state, *fields = file.read().rsplit(")", 1)[1].split()
            return None if state in "ZX" else fields[18]  # a zombie trains nothing
    except (OSError, IndexError):
        return None
