"""Unfinished stages in a store: a checkpoint each, never part of a result, and failures that would repeat.

    ROOT/checkpoints/KEY/checkpoint.json         which file it is, sealed with its own digest; written last
    ROOT/checkpoints/KEY/HEX.safetensors         its tensors
    ROOT/failures/KEY                            the failure; safe to delete

A checkpoint is removed when its stage is committed. A writer removes only the file that its own pointer has just
replaced, so the file that a pointer names exists even if several processes write. Nothing is ever unpickled.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from orchestrator.core.errors import CheckpointDamaged, StoreError
from orchestrator.core.file_names import component
from orchestrator.core.plain_data import Count, read_as
from orchestrator.core.records import BLOCKS, NOWHERE, CurvePoint, FileInfo, Reached
from orchestrator.core.work_order import Checkpoint, FileWriter, PastFailure
from orchestrator.store.backends import Backend, seal, store_logger, unseal

FOLDER, POINTER = "checkpoints", "checkpoint.json"
FORMAT = 1

_log = store_logger(__name__)


@dataclass(frozen=True)
class _Pointer:
    """The content of checkpoint.json."""

    format: int
    file: str
    info: FileInfo
    step: Count
    values: Mapping[str, Any]


class Checkpoints:
    """Checkpoints in a backend; `name` is the store's name in messages."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend, self._name = backend, name

    def save(self, key: str, step: int, values: Mapping[str, Any], tensors: FileWriter) -> None:
        """Save a checkpoint durably in place of the stage's previous one.

        Args:
            key: key of the stage
            step: step that the stage has reached
            values: plain data
            tensors: writes the file of tensors, front to back

        Raises:
            StoreError: the store is full, read-only or unreachable; the previous checkpoint stays
        """
        before, file = self._pointer_or_none(key), f"{uuid.uuid4().hex}.safetensors"
        try:
            info = self._backend.put(f"{_folder(key)}/{file}", tensors)
            pointer = {"format": FORMAT, "file": file, "info": asdict(info), "step": step, "values": values}
            self._backend.write(f"{_folder(key)}/{POINTER}", seal(pointer))
        except BaseException:
            with suppress(StoreError):
                self._backend.remove(f"{_folder(key)}/{file}")
            raise
        if before is not None:
            self._backend.remove(f"{_folder(key)}/{before.file}")

    def latest(self, key: str) -> Checkpoint | None:
        """Return the checkpoint of a stage, with its file verified and on this node; None if there is none.

        Raises:
            CheckpointDamaged: the checkpoint differs from what was saved; the message says how
            StoreError: the store is unreachable
        """
        try:
            pointer = self._pointer(key)
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise CheckpointDamaged(f"{POINTER} is damaged: {error}") from None
        try:
            path, found = self._backend.fetch(f"{_folder(key)}/{pointer.file}", pointer.info)
        except FileNotFoundError:
            with suppress(FileNotFoundError, ValueError):
                if self._pointer(key) != pointer:  # another attempt has just saved a later checkpoint
                    return self.latest(key)
            raise CheckpointDamaged(f"{pointer.file} is missing") from None
        if found != pointer.info:
            raise CheckpointDamaged(
                f"{pointer.file} has {found.bytes} bytes of SHA-256 {found.sha256}, not {pointer.info}"
            )
        return Checkpoint(pointer.step, pointer.values, path)

    def reached(self, key: str) -> Reached:
        """Return the place of a stage's checkpoint; `NOWHERE` if there is none, or it cannot be read."""
        if (pointer := self._pointer_or_none(key)) is None:
            return NOWHERE
        return Reached(BLOCKS not in pointer.values.get("state", {}), pointer.step)

    def curve(self, key: str) -> tuple[CurvePoint, ...]:
        """Return the learning curve in a stage's checkpoint; no points if there is none, or it cannot be read."""
        pointer = self._pointer_or_none(key)
        with suppress(ValueError):
            return () if pointer is None else read_as(tuple[CurvePoint, ...], pointer.values.get("curve", ()))
        return ()

    def drop(self, key: str) -> None:
        """Remove the checkpoint of a stage, if there is one."""
        self._backend.remove_folder(_folder(key))

    def put_aside(self, key: str, reason: str) -> None:
        """Move a checkpoint to quarantine/ and log the reason in a warning; its stage starts from the beginning."""
        target = f"quarantine/checkpoint-{component(key, 'key')}-{uuid.uuid4().hex[:8]}"
        _log.warning("%s: the checkpoint of stage %s was set aside in %s: %s", self._name, key[:12], target, reason)
        self._backend.move(_folder(key), target)
        self._backend.write(f"{target}/reason.txt", f"{reason}\n".encode())

    def known(self) -> list[str]:
        """Return the keys of the stages that have a checkpoint, or leftovers of one."""
        return self._backend.names(FOLDER)

    def places(self, keys: Collection[str]) -> dict[str, Reached]:
        """Return key -> place of the checkpoint, for the stages among `keys` that have one."""
        found = {key: self.reached(key) for key in self.known() if key in keys}
        return {key: place for key, place in found.items() if place != NOWHERE}

    def drop_all(self, keys: Iterable[str]) -> None:
        """Remove the checkpoints of those of `keys` that have one."""
        for key in set(self.known()).intersection(keys):
            self.drop(key)

    def _pointer_or_none(self, key: str) -> _Pointer | None:
        try:
            return self._pointer(key)
        except (FileNotFoundError, ValueError):
            return None

    def _pointer(self, key: str) -> _Pointer:
        pointer: _Pointer = read_as(_Pointer, unseal(self._backend.read(f"{_folder(key)}/{POINTER}")))
        if pointer.format != FORMAT:
            raise ValueError(f"it has format {pointer.format}, and this release reads {FORMAT}")
        try:
            component(pointer.file, "file")
        except StoreError as error:
            raise ValueError(str(error)) from None
        return pointer


def _folder(key: str) -> str:
    return f"{FOLDER}/{component(key, 'key')}"


FAILURES = "failures"


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
        return self._backend.names(FAILURES)

    def drop(self, key: str) -> None:
        """Remove the failure of a stage, if there is one."""
        self._backend.remove(_path(key))

    def drop_all(self, keys: Iterable[str]) -> None:
        """Remove the failures of those of `keys` that have one."""
        for key in set(self.known()).intersection(keys):
            self.drop(key)


def _path(key: str) -> str:
    return f"{FAILURES}/{component(key, 'key')}"
