"""A store in a local or shared directory: written aside, synced, renamed."""

from __future__ import annotations

import errno
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import RECORD
from orchestrator.core.records import FileInfo
from orchestrator.core.work_order import FileWriter
from orchestrator.store.backends import Entry, Seal, describe, explained, write_hashed


class LocalBackend:
    """A directory. A folder is published by writing it aside, syncing it and renaming it: all of it or nothing."""

    remote = False

    def __init__(self, root: str) -> None:
        self.root = root
        self._real_root = os.path.join(os.path.realpath(root), "")

    def read(self, path: str) -> bytes:
        with self._opened(path) as file:
            return file.read()

    def fetch(self, path: str, expected: FileInfo) -> tuple[Path, FileInfo]:
        del expected
        return Path(self._full(path)), self.describe(path)

    def describe(self, path: str) -> FileInfo:
        with self._opened(path) as file:
            return describe(file)

    def write(self, path: str, data: bytes) -> None:
        self.put(path, lambda file: file.write(data))

    def put(self, path: str, writer: FileWriter) -> FileInfo:
        with self._aside(path) as aside:
            info = write_hashed(aside, writer)
            os.replace(aside, self._full(path))
        return info

    def create(self, path: str, data: bytes) -> bool:
        with self._aside(path) as aside:
            write_hashed(aside, lambda file: file.write(data), sync=False)
            try:
                os.link(aside, self._full(path))
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS):
                    raise
                return self._create_without_links(path, data)
        return True

    def _create_without_links(self, path: str, data: bytes) -> bool:
        try:
            write_hashed(self._full(path), lambda file: file.write(data), sync=False)
        except FileExistsError:
            return False
        return True

    def publish(self, folder: str, files: Mapping[str, FileWriter], seal: Seal) -> dict[str, FileInfo] | None:
        target = self._full(folder)
        with self._aside(folder) as aside:
            os.mkdir(aside)
            found = {}
            for name, writer in files.items():
                os.makedirs(os.path.dirname(os.path.join(aside, name)), exist_ok=True)
                found[name] = write_hashed(os.path.join(aside, name), writer)
            record = seal(found)
            write_hashed(os.path.join(aside, RECORD), lambda file: file.write(record))
            for directory, _, _ in os.walk(aside):
                _sync_directory(directory)
            try:
                os.rename(aside, target)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise
                return None
            _sync_directory(os.path.dirname(target))
        return found

    def size(self, path: str) -> int:
        with explained(self.root, f"look at {path}"):
            return os.stat(self._full(path)).st_size

    def names(self, folder: str) -> list[str]:
        with explained(self.root, f"list {folder}"):
            try:
                return sorted(os.listdir(self._full(folder)))
            except FileNotFoundError:
                return []

    def move(self, folder: str, target: str) -> None:
        with explained(self.root, f"move {folder} to {target}"), suppress(FileNotFoundError):
            os.makedirs(os.path.dirname(self._full(target)), exist_ok=True)
            os.rename(self._full(folder), self._full(target))

    def remove(self, path: str) -> None:
        with explained(self.root, f"remove {path}"), suppress(FileNotFoundError):
            os.unlink(self._full(path))

    def remove_folder(self, folder: str) -> None:
        gone = f"tmp/{uuid.uuid4().hex}"
        self.move(folder, gone)  # at once for every reader, however many files there are
        with explained(self.root, f"remove {folder}"), suppress(FileNotFoundError):
            shutil.rmtree(self._full(gone))

    def entries(self) -> Iterator[Entry]:
        for directory, _, names in os.walk(self.root):
            for name in names:
                full = os.path.join(directory, name)
                with suppress(FileNotFoundError):
                    info = os.lstat(full)
                    yield Entry(os.path.relpath(full, self.root), info.st_size, info.st_mtime)

    def _full(self, path: str) -> str:
        return os.path.join(self.root, path)

    @contextmanager
    def _opened(self, path: str) -> Iterator[BinaryIO]:
        full = self._full(path)
        with explained(self.root, f"read {path}"):
            if not os.path.realpath(full).startswith(self._real_root):
                raise StoreError(f"`store.uri` (={self.root}): {path} is a link that leaves the store; remove it")
            with open(full, "rb") as file:
                yield file

    @contextmanager
    def _aside(self, path: str) -> Iterator[str]:
        """Give a name in tmp/ to write under, make the parent of `path`, and leave nothing behind."""
        aside = self._full(f"tmp/{uuid.uuid4().hex}")
        with explained(self.root, f"write {path}", OSError):  # what else a writer raises is not the store's
            try:
                os.makedirs(os.path.dirname(aside), exist_ok=True)
                os.makedirs(os.path.dirname(self._full(path)), exist_ok=True)
                yield aside
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
            finally:
                with suppress(OSError):
                    os.unlink(aside)
                shutil.rmtree(aside, ignore_errors=True)


def _sync_directory(full: str) -> None:
    """Make renames in a directory durable; file systems that cannot sync a directory do not need it."""
    descriptor = os.open(full, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
