"""The interface of store backends, files that are hashed as they are written, and error messages of file systems.

Paths are relative to the store's root and use `/`. Somebody else may have written a store, so a backend for directories
never follows a link, never leaves the root, and treats anything but a regular file as missing.
"""

from __future__ import annotations

import errno
import getpass
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from orchestrator.core.errors import StoreError
from orchestrator.core.plain_data import MOST_BYTES, digest, parse_json, refuse_large
from orchestrator.core.records import FileInfo
from orchestrator.core.redact import logger, redact
from orchestrator.core.work_order import FileWriter

Seal = Callable[[Mapping[str, FileInfo]], bytes]
"""Takes the files of a stage that were just written, and returns the content of its record."""


@dataclass(frozen=True)
class Entry:
    """A file of the store: its path below the root, its size in bytes and the Unix time it was written at."""

    path: str
    bytes: int
    modified: float


class Backend(Protocol):
    """The operations that a store needs. A missing file raises FileNotFoundError, any other problem StoreError."""

    @property
    def remote(self) -> bool:
        """Whether every operation costs a request, and a folder cannot be published atomically."""
        ...

    def read(self, path: str, most: int = MOST_BYTES) -> bytes:
        """Return the content of a small file. A local backend refuses a file with more than `most` bytes."""
        ...

    def fetch(self, path: str, expected: FileInfo) -> tuple[Path, FileInfo]:
        """Return a local path with the content of a file, and the digest and size found there. Open the path at once.

        If the digest and size differ from `expected`, the path must not be used.
        """
        ...

    def describe(self, path: str) -> FileInfo:
        """Read a file and return the digest and size of its content."""
        ...

    def write(self, path: str, data: bytes) -> None:
        """Write or replace a small file. A reader sees the old content or the new content, never a mixture."""
        ...

    def put(self, path: str, writer: FileWriter) -> FileInfo:
        """Write or replace a file of any size in the same way, and return its digest and size."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Write a small file that does not exist yet. If several processes try, exactly one gets True."""
        ...

    def publish(self, folder: str, files: Mapping[str, FileWriter], seal: Seal) -> dict[str, FileInfo] | None:
        """Write a folder with its record, which `seal` makes and which is written last. Nobody can replace the folder.

        The folder counts as existing once the record is there. If several processes try, one gets the digests and sizes
        of its files, and the others get None.
        """
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def names(self, folder: str) -> list[str]:
        """Return the sorted names in a folder; an empty list if there is no such folder."""
        ...

    def move(self, folder: str, target: str) -> None:
        """Move a folder within the store; do nothing if another process has moved it already."""
        ...

    def remove(self, path: str) -> None:
        """Remove a file, if it is there."""
        ...

    def remove_folder(self, folder: str) -> None:
        """Remove a folder and everything below it, if it is there."""
        ...

    def entries(self, below: str = "") -> Iterator[Entry]:
        """Yield every file of the store, or of one of its folders."""
        ...


AT_ONCE = 64 * 2**20
"""Number of written bytes after which a sync to disk begins, while later bytes are still being hashed."""


class _HashedFile(io.BufferedWriter):
    """A new file that is hashed as it is written, front to back."""

    def __init__(self, full: str | Path) -> None:
        super().__init__(io.FileIO(full, "x"))
        self._digest, self._bytes, self._begun = hashlib.sha256(), 0, 0
        self._syncing: Future[None] | None = None
        self.beside: Executor | None = None
        """Syncs the bytes written so far while later ones are written; with None, `sync` does all of the work."""

    def write(self, data: Any, /) -> int:
        self._digest.update(data)
        self._bytes += (written := super().write(data))
        if self.beside is not None and self._bytes - self._begun >= AT_ONCE and self._is_idle():
            self._begun, self._syncing = self._bytes, self.beside.submit(os.fsync, self.fileno())
        return written

    def sync(self) -> None:
        """Make the written bytes durable. Raise the error of an earlier sync, as a file system reports it only once."""
        if self._syncing is not None:
            self._syncing.result()
        self.flush()
        os.fsync(self.fileno())

    def _is_idle(self) -> bool:
        if self._syncing is None or not self._syncing.done():
            return self._syncing is None
        self._syncing.result()
        return True

    def seek(self, *_: Any) -> int:
        raise io.UnsupportedOperation("a file that is hashed as it is written cannot be written out of order")

    @property
    def info(self) -> FileInfo:
        return FileInfo(self._digest.hexdigest(), self._bytes)


def write_hashed(full: str | Path, writer: FileWriter, sync: bool = True) -> FileInfo:
    """Write a new file on this node and return its digest and size; `sync` makes it durable."""
    with _HashedFile(full) as file, ThreadPoolExecutor(1) as beside:
        file.beside = beside if sync else None
        writer(file)
        if sync:
            file.sync()
    return file.info


def describe(file: BinaryIO) -> FileInfo:
    """Read a file to its end, piece by piece, and return its digest and size."""
    found, size = hashlib.sha256(), 0
    while data := file.read(2**20):
        found.update(data)
        size += len(data)
    return FileInfo(found.hexdigest(), size)


@contextmanager
def explained(uri: str, doing: str, kind: type[Exception] = Exception) -> Iterator[None]:
    """Turn errors of a file system into a StoreError with a plain sentence.

    FileNotFoundError, FileExistsError and StoreError pass through unchanged.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError, StoreError):
        raise
    except kind as error:
        raise StoreError(f"`store.uri` (={redact(uri)}): could not {doing}: {_reason(error)}") from error


_ARGUMENTS: list[str] = []
"""Arguments of the `given_as` blocks that are active in this process, the innermost last."""


@contextmanager
def given_as(argument: str) -> Iterator[None]:
    """Replace `store.uri` in StoreErrors and warnings with the argument that the user typed the store's address in."""
    _ARGUMENTS.append(argument)
    try:
        yield
    except StoreError as error:
        raise StoreError(named_as(argument, str(error))) from error
    finally:
        _ARGUMENTS.remove(argument)


def store_logger(name: str) -> logging.Logger:
    """Return the logger of a module of the store; its warnings name the store as StoreErrors do."""
    found = logger(name)
    found.addFilter(_name_argument)
    return found


def _name_argument(record: logging.LogRecord) -> bool:
    if _ARGUMENTS:
        record.msg, record.args = named_as(_ARGUMENTS[-1], record.getMessage()), ()
    return True


def named_as(argument: str, text: str) -> str:
    """Return a message about a store that names `argument` instead of `store.uri`."""
    return text.replace("`store.uri`", f"`{argument}`")


def _reason(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number in (errno.ENOSPC, errno.EDQUOT):
        return (
            "the disk or quota is full. Free some space (`python -m orchestrator.store prune` drops weights that are "
            "not needed) and run the same command again; finished stages are kept"
        )
    if number == errno.EFBIG:
        return "the file is larger than this process may write; raise the limit (`ulimit -f`) and run the command again"
    if number == errno.EROFS:
        return "the file system is read-only. Choose a `store.uri` that is writable"
    if number in (errno.ENOTDIR, errno.EEXIST):
        return "a part of that path is a file, not a directory. Choose another `store.uri`"
    if isinstance(error, PermissionError):
        return f"permission denied for user {_user()} ({_first_line(error)}). Grant it, or choose another `store.uri`"
    if type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError"):
        return (
            "no credentials found. Set the object store's credentials in the environment of the driver and every node"
        )
    return f"{_first_line(error)}. Check the address and the connection to the store, then run the same command again"


def _first_line(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return redact(text.splitlines()[0]).rstrip(".")


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


_OPENING = b'{"sha256":"'
_BODY = len(_OPENING) + 64 + len(b'",')


def seal(data: Mapping[str, Any], times: int = 1) -> bytes:
    """Return `data` (plain data, not empty) as a JSON object whose first member `sha256` is the digest of the others.

    sha256 = SHA-256(JSON of data in its order, without spaces)

    Args:
        data: the data
        times: factor on the limits of `parse_json`

    Raises:
        ValueError: `data` holds NaN or an infinity, which JSON cannot represent, or is too large to be read again
    """
    body = json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    refuse_large(body, times)
    return _OPENING + digest(body).encode() + b'",' + body[1:]


def unseal(content: bytes, times: int = 1) -> dict[str, Any]:
    """Return the data that `seal` was given; `times` is a factor on the limits of `parse_json`.

    Raises:
        ValueError: the content was changed (the message gives the expected and the found digest), or exceeds the limits
            of `parse_json`
    """
    expected = content[len(_OPENING) : len(_OPENING) + 64].decode(errors="replace")
    if not content.startswith(_OPENING) or len(content) <= _BODY or not expected.isalnum():
        raise ValueError(f"expected a sealed JSON file, found {len(content)} bytes without a seal")
    body = b"{" + content[_BODY:]
    if expected != (found := digest(body)) or content[_BODY - 2 : _BODY] != b'",':
        raise ValueError(f"expected SHA-256 {expected}, found {found}")
    data: dict[str, Any] = parse_json(body, times)
    return data
