"""The commit of a stage: its sealed record, and the folder of its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import RECORD, component
from orchestrator.core.plain_data import quoted, read_as
from orchestrator.core.records import StageRecord
from orchestrator.store.sealed_json import unseal


@dataclass(frozen=True)
class Commit:
    """A committed record and its attempt: the subfolder of the stage's folder with the files ("" for none)."""

    record: StageRecord
    attempt: str

    @property
    def key(self) -> str:
        """The stage's key."""
        return self.record.key

    @property
    def paths(self) -> set[str]:
        """The paths of the record and of all files of the stage."""
        return {f"{folder_of(self.key)}/{RECORD}", *(self.path(name) for name in self.record.files)}

    def path(self, name: str) -> str:
        """Return the path of a file of the stage."""
        return f"{folder_of(self.key)}/{join(self.attempt, name)}"


def folder_of(key: str) -> str:
    """Return the folder of a stage; raise StoreError for a key that is not a safe name."""
    return f"stages/{component(key, 'key')}"


@dataclass(frozen=True)
class _Sealed:
    """The content of a record's file."""

    record: Mapping[str, Any]
    attempt: str


def parse(content: bytes, key: str) -> Commit:
    """Parse the file of a stage's record.

    Raises:
        ValueError: the file is damaged, or the record is that of another stage
        OrchestratorError: another release wrote the record
    """
    sealed: _Sealed = read_as(_Sealed, unseal(content))
    record, attempt = StageRecord.from_json(sealed.record), sealed.attempt
    if record.key != key:
        raise ValueError(f"expected the record of this stage, found that of {quoted(record.key)}")
    try:
        for name in (*record.files, *([attempt] if attempt else [])):
            check_name(name)
    except StoreError as error:
        raise ValueError(str(error)) from None
    return Commit(record, attempt)


def check_name(name: str) -> None:
    """Raise StoreError for a file name that leaves the stage's folder or would replace the record."""
    for part in name.split("/"):
        component(part, "name")
    if name == RECORD:
        raise StoreError(f"`name` (={RECORD!r}) is reserved for the store; choose another")


def join(folder: str, name: str) -> str:
    """Return the path of a file in a folder; "" means no folder."""
    return f"{folder}/{name}" if folder else name
