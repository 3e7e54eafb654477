"""Backend for object stores and other fsspec file systems. The record of a stage is written last, and once."""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import RECORD, component
from orchestrator.core.records import FileInfo
from orchestrator.core.redact import redact
from orchestrator.core.work_order import FileWriter
from orchestrator.store.backends import Entry, Seal, describe, explained, write_hashed
from orchestrator.store.local_backend import node_folder, tidy

FETCHED = ".fetched"
"""Suffix of files that were fetched to this node; their names begin with the digest of their content."""


def absolute(uri: str) -> str:
    """Return the canonical URI of a store; a directory gets its absolute path. Raise StoreError for an invalid URI."""
    for scheme in ("file://", "local://"):
        uri = uri.removeprefix(scheme)
    if "://" in uri:
        _check_protocol(uri)
        return uri.rstrip("/")
    if found := re.fullmatch(r"([A-Za-z][\w+.-]+):(/.*)", uri):
        meant = found[2] if found[1] in ("file", "local") else f"{found[1]}:/{found[2]}"
        raise StoreError(
            f"`store.uri` (={redact(uri)}) must have two slashes behind its protocol; type {redact(meant)}, or "
            f"./{redact(uri)} for a directory of that name"
        )
    if not uri.strip():
        raise StoreError(f"`store.uri` (={uri!r}) must name a directory or a URI such as s3://bucket/prefix")
    return os.path.abspath(os.path.expanduser(uri))


def _check_protocol(uri: str) -> None:
    """Raise StoreError if the protocol of `uri` is unknown, or its package is not installed."""
    import fsspec

    protocol = uri.split("://", 1)[0]
    try:
        if "::" in uri:
            raise ValueError("chained file systems are not supported")
        fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
        remedy = f"pip install 'pruning-orchestrator[{extra}]'" if extra else f"install it: {error}"
        raise StoreError(f"`store.uri` (={redact(uri)}) needs a package that is missing; {remedy}") from error
    except ValueError as error:
        raise StoreError(
            f"`store.uri` (={redact(uri)}) must be a path or an fsspec URI such as s3://bucket/prefix: {error}"
        ) from error


class ObjectBackend:
    """Backend for any fsspec file system (s3://, gs://, memory://). Writing the record commits a stage.

    The record is written last, and only once: by a conditional write (`If-None-Match: *` on S3, a generation match on
    GCS). On a file system without conditional writes, two processes that commit one stage at the same moment may both
    believe that they won, and the later record stands. The stage is still whole and consistent, since the files of
    each attempt have a folder of their own.
    """

    remote = True

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        import fsspec

        self.uri = uri
        if uri.startswith(("s3://", "s3a://")):
            options = {"max_concurrency": 1, **options}  # with more, s3fs asks for the size before every read
        with explained(uri, "open the store"):
            self._fs, root = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)
        self._root = root.rstrip("/")
        # S3 and GCS hold one part in memory, or two for a file of up to two parts; others copy in small blocks.
        self._parts = {"chunksize": 8 * 2**20} if uri.startswith(("s3://", "s3a://", "gs://", "gcs://")) else {}

    def read(self, path: str, most: int = 0) -> bytes:
        del most  # checking the size would cost another request
        with explained(self.uri, f"read {path}"):
            return bytes(self._fs.cat_file(self._full(path)))

    def fetch(self, path: str, expected: FileInfo) -> tuple[Path, FileInfo]:
        with self._spool() as aside:
            kept = aside.with_name(f"{component(expected.sha256, 'sha256')}{FETCHED}")
            with suppress(OSError):
                os.utime(kept)
                with kept.open("rb") as file:
                    if (found := describe(file)) == expected:
                        return kept, found
            self._download(self._full(path), aside)
            with aside.open("rb") as file:
                found = describe(file)
            if found == expected:
                os.replace(aside, kept)
        return kept, found

    def describe(self, path: str) -> FileInfo:
        with explained(self.uri, f"read {path}"), self._fs.open(self._full(path), "rb") as file:
            return describe(file)

    def write(self, path: str, data: bytes) -> None:
        with self._writing(path):
            self._fs.pipe_file(self._full(path), data)

    def put(self, path: str, writer: FileWriter) -> FileInfo:
        with self._spool() as aside:
            info = write_hashed(aside, writer, sync=False)
            with self._writing(path):
                self._fs.put_file(str(aside), self._full(path), **self._parts)
        return info

    def create(self, path: str, data: bytes) -> bool:
        with self._writing(path):
            try:
                self._fs.pipe_file(self._full(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError:
                # Servers report a failed condition in many ways, so look whether the object is there now.
                if not self._fs.exists(self._full(path)):
                    raise
                return False
        return True

    def publish(self, folder: str, files: Mapping[str, FileWriter], seal: Seal) -> dict[str, FileInfo] | None:
        found = {name: self.put(f"{folder}/{name}", writer) for name, writer in files.items()}
        return found if self.create(f"{folder}/{RECORD}", seal(found)) else None

    def size(self, path: str) -> int:
        with explained(self.uri, f"look at {path}"):
            return int(self._fs.info(self._full(path))["size"])

    def names(self, folder: str) -> list[str]:
        with explained(self.uri, f"list {folder}"):
            try:
                self._fs.invalidate_cache()
                found = self._fs.ls(self._full(folder), detail=False)
            except FileNotFoundError:
                return []
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in found)

    def move(self, folder: str, target: str) -> None:
        with explained(self.uri, f"move {folder} to {target}"):
            self._fs.invalidate_cache()
            for path in self._fs.find(self._full(folder)):
                with suppress(FileNotFoundError), self._spool() as aside:
                    self._download(path, aside)
                    self._fs.put_file(str(aside), self._full(target) + path[len(self._full(folder)) :], **self._parts)
        self.remove_folder(folder)

    def remove(self, path: str) -> None:
        with explained(self.uri, f"remove {path}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def remove_folder(self, folder: str) -> None:
        with explained(self.uri, f"remove {folder}"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._full(folder))
            # The record goes first, so that a half-removed folder no longer counts as a stage.
            for file in sorted(found, key=lambda file: (not file.endswith(RECORD), file)):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(file)

    def entries(self, below: str = "") -> Iterator[Entry]:
        with explained(self.uri, "list the store"):
            self._fs.invalidate_cache()
            found = self._fs.find(f"{self._root}/{below}".rstrip("/"), detail=True)
        for path, info in found.items():
            modified = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("updated")
            yield Entry(path[len(self._root) + 1 :], int(info["size"] or 0), _timestamp(modified))

    @contextmanager
    def _spool(self) -> Iterator[Path]:
        """Yield a new file name on this node's disk, and remove the file at the end."""
        folder = node_folder() or _private_folder()
        aside = folder / f".{uuid.uuid4().hex}"
        with suppress(OSError):  # another process may tidy at the same time
            tidy(folder, FETCHED, spared=60)
        with explained(self.uri, f"keep a file in {folder} (TMPDIR) on its way", OSError):
            try:
                yield aside
            except FileNotFoundError as error:
                if folder.exists():
                    raise
                # Not FileNotFoundError, which would mean that the file is missing in the store.
                raise OSError(f"{folder} was removed") from error
            finally:
                with suppress(OSError):
                    aside.unlink(missing_ok=True)

    def _download(self, full: str, aside: Path) -> None:
        with explained(self.uri, f"read {full} into {aside.parent} (TMPDIR)"):
            self._fs.get_file(full, str(aside))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        with explained(self.uri, f"write {path}"):
            try:
                yield
            except FileNotFoundError as error:
                raise StoreError(
                    f"`store.uri` (={redact(self.uri)}): could not write {path}: the bucket does not exist. "
                    "Create it, or choose another `store.uri`"
                ) from error


@cache
def _private_folder() -> Path:
    """Make a temporary directory for this process alone, for use when the user has no node folder."""
    return Path(tempfile.mkdtemp())


def _timestamp(modified: datetime | float | None) -> float:
    """Return the time as Unix seconds; a file of unknown age counts as new."""
    if isinstance(modified, datetime):
        return modified.timestamp()
    return float("inf") if modified is None else float(modified)
