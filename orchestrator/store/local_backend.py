"""Backend for a local or shared directory. Files are written to a temporary name, synced and renamed."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import RECORD
from orchestrator.core.plain_data import MOST_BYTES
from orchestrator.core.records import FileInfo
from orchestrator.core.redact import redact
from orchestrator.core.work_order import FileWriter
from orchestrator.store.backends import Entry, Seal, describe, explained, write_hashed


class LocalBackend:
    """Backend for a directory. A folder is written to a temporary name, synced and renamed, so it appears whole."""

    remote = False

    def __init__(self, root: str) -> None:
        self.root = root

    def read(self, path: str, most: int = MOST_BYTES) -> bytes:
        with explained(self.root, f"read {path}"):
            full, found = self._file(path)
            if found > most:
                raise StoreError(f"`store.uri` (={self.root}): {path} has {found} bytes, more than the limit of {most}")
            with open(full, "rb") as file:
                return file.read()

    def fetch(self, path: str, expected: FileInfo) -> tuple[Path, FileInfo]:
        del expected
        return Path(self._full(path)), self.describe(path)

    def describe(self, path: str) -> FileInfo:
        with explained(self.root, f"read {path}"), open(self._file(path)[0], "rb") as file:
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
                with suppress(FileNotFoundError):
                    if not stat.S_ISREG(os.lstat(self._full(path)).st_mode):
                        raise StoreError(
                            f"`store.uri` (={self.root}): {path} is not a regular file; remove it"
                        ) from None
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
            return self._file(path)[1]

    def names(self, folder: str) -> list[str]:
        with explained(self.root, f"list {folder}"):
            try:
                return sorted(os.listdir(self._folder(folder)))
            except FileNotFoundError:
                return []

    def move(self, folder: str, target: str) -> None:
        with explained(self.root, f"move {folder} to {target}"), suppress(FileNotFoundError):
            os.makedirs(os.path.dirname(self._full(target)), exist_ok=True)
            os.rename(self._folder(folder), self._folder(target))

    def remove(self, path: str) -> None:
        with explained(self.root, f"remove {path}"), suppress(FileNotFoundError):
            os.unlink(self._full(path))

    def remove_folder(self, folder: str) -> None:
        gone = f"tmp/{uuid.uuid4().hex}"
        self.move(folder, gone)  # a rename hides all files from readers at the same moment
        with explained(self.root, f"remove {folder}"), suppress(FileNotFoundError):
            full = self._folder(gone)
            shutil.rmtree(full) if os.path.isdir(full) else os.unlink(full)

    def entries(self, below: str = "") -> Iterator[Entry]:
        pending = [f"{below}/" if below else ""]
        while pending:
            below = pending.pop()
            with suppress(FileNotFoundError), explained(self.root, f"list {below}"):
                for found in list(os.scandir(f"{self.root}/{below}")):
                    if found.is_dir(follow_symlinks=False):
                        pending.append(f"{below}{found.name}/")
                    elif found.is_file(follow_symlinks=False):
                        with suppress(FileNotFoundError):
                            info = found.stat(follow_symlinks=False)
                            yield Entry(f"{below}{found.name}", info.st_size, info.st_mtime)

    def _full(self, path: str) -> str:
        """Return the full path of a file in the store; raise StoreError if it leaves the root or passes a link."""
        folder, _, name = path.rpartition("/")
        return f"{self._folder(folder)}/{self._part(path, name)}"

    def _folder(self, path: str) -> str:
        """Return the full path of a folder in the store ("" is the root); raise StoreError as `_full` does."""
        full = self.root
        for part in path.split("/") if path else ():
            full = f"{full}/{self._part(path, part)}"
            if os.path.islink(full):
                raise StoreError(
                    f"`store.uri` (={self.root}): {full} is a link; a store must not hold links; remove it"
                )
        return full

    def _part(self, path: str, part: str) -> str:
        if part in ("", ".", "..") or "\0" in part:
            raise StoreError(f"`store.uri` (={self.root}): {path!r} is not a valid path in a store")
        return part

    def _file(self, path: str) -> tuple[str, int]:
        """Return the full path of a file and its size in bytes; anything but a regular file counts as missing."""
        info = os.lstat(full := self._full(path))
        if not stat.S_ISREG(info.st_mode):
            what = "a link, and links are not followed" if stat.S_ISLNK(info.st_mode) else "not a regular file"
            raise FileNotFoundError(errno.ENOENT, f"it is {what}", path)
        return full, info.st_size

    def _refuse_dangling_link(self) -> None:
        """Raise StoreError if the root, or a directory above it, is a link to a place that does not exist."""
        for folder in (Path(self.root), *Path(self.root).parents):
            if folder.is_symlink() and not folder.exists():
                where = "" if str(folder) == self.root else f"lies below {folder}, which "
                raise StoreError(
                    f"`store.uri` (={redact(self.root)}) {where}is a link to {os.readlink(folder)}, which does not "
                    "exist; make that directory, or choose another `store.uri`"
                )

    @contextmanager
    def _aside(self, path: str) -> Iterator[str]:
        """Yield a new temporary name in tmp/, make the parent of `path`, and remove the temporary file at the end."""
        aside = self._full(f"tmp/{uuid.uuid4().hex}")
        with explained(self.root, f"write {path}", OSError):  # a writer's other errors are not the store's fault
            try:
                try:
                    os.makedirs(os.path.dirname(aside), exist_ok=True)
                except FileNotFoundError as error:
                    self._refuse_dangling_link()
                    # /proc answers this way when it refuses a new directory.
                    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from error
                os.makedirs(os.path.dirname(self._full(path)), exist_ok=True)
                yield aside
            except FileExistsError as error:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from error
            finally:
                with suppress(OSError):
                    os.unlink(aside)
                shutil.rmtree(aside, ignore_errors=True)


def _sync_directory(full: str) -> None:
    """Make renames in a directory durable. File systems that cannot sync a directory do not need this."""
    descriptor = os.open(full, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


KEPT = 8
"""Number of files of each kind that stay; when one more is written, the least recently used are removed."""
ABANDONED = 3600.0
"""Age in seconds after which an unfinished file, whose name begins with a dot, belongs to a killed process."""


def node_folder() -> Path | None:
    """Return the node folder; None if no folder is sure to belong to this user alone."""
    if sys.platform == "win32":
        return None
    try:
        folder = Path(tempfile.gettempdir(), f"pruning-orchestrator-{os.getuid()}")
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()  # another user may have put a link here, so it is not followed
    except OSError:
        return None
    own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return folder if own else None


def tidy(folder: Path, suffix: str, spared: float = 0.0) -> None:
    """Remove all but the `KEPT` most recently used files of a kind, and the leftovers of killed processes.

    Args:
        folder: the folder that `node_folder` returned
        suffix: file name suffix of the kind
        spared: seconds after its last use during which a file is never removed
    """
    now = time.time()
    used = dict[Path, float]()
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # other processes remove their own files
            used[path] = path.stat().st_mtime
    kind = sorted((path for path in used if path.suffix == suffix), key=used.__getitem__, reverse=True)
    old = [path for path in kind[KEPT:] if now - used[path] > spared]
    left = [path for path in used if path.name.startswith(".") and now - used[path] > ABANDONED]
    for path in (*old, *left):
        path.unlink(missing_ok=True)
