"""A store on an object store or any other fsspec file system: the record is written last, once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Any

from orchestrator.core.errors import StoreError
from orchestrator.core.redact import redact
from orchestrator.store.backends import Entry, explained


def check_protocol(uri: str) -> None:
    """Raise StoreError where no file system answers to the protocol of `uri`, or its package is not installed."""
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
    """Any fsspec file system (s3://, gs://, memory://): the record, written last and only once, is the commit.

    "Only once" is a conditional write (`If-None-Match: *` on S3, a generation match on GCS). Where a backend has none,
    two commits of one stage at the same moment may both be told that they won, and the later record stands: whole and
    consistent all the same, since every attempt's files have a folder of their own.
    """

    remote = True

    def __init__(self, uri: str, options: Mapping[str, Any]) -> None:
        import fsspec

        self.uri = uri
        if uri.startswith(("s3://", "s3a://")):
            options = {"max_concurrency": 1, **options}  # more would ask for the size before every read
        with explained(uri, "open the store"):
            self._fs, root = fsspec.core.url_to_fs(uri, use_listings_cache=False, **options)
        self._root = root.rstrip("/")

    def read(self, path: str) -> bytes:
        with explained(self.uri, f"read {path}"):
            return bytes(self._fs.cat_file(self._full(path)))

    def write(self, path: str, data: bytes) -> None:
        with self._writing(path):
            self._fs.pipe_file(self._full(path), data)

    def create(self, path: str, data: bytes) -> bool:
        with self._writing(path):
            try:
                self._fs.pipe_file(self._full(path), data, mode="create")
            except FileExistsError:
                return False
            except OSError:
                # Servers word a failed condition in many ways: what counts is whether the object is there now.
                if not self._fs.exists(self._full(path)):
                    raise
                return False
        return True

    def publish(self, folder: str, files: Mapping[str, bytes]) -> bool:
        *others, last = files
        for name in others:
            self.write(f"{folder}/{name}", files[name])
        return self.create(f"{folder}/{last}", files[last])

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
                with suppress(FileNotFoundError):
                    self._fs.pipe_file(self._full(target) + path[len(self._full(folder)) :], self._fs.cat_file(path))
        self.remove_folder(folder)

    def remove(self, path: str) -> None:
        with explained(self.uri, f"remove {path}"), suppress(FileNotFoundError):
            self._fs.rm_file(self._full(path))

    def remove_folder(self, folder: str) -> None:
        with explained(self.uri, f"remove {folder}"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._full(folder))
            # The record first: a folder half removed is then not a stage any more.
            for file in sorted(found, key=lambda file: (not file.endswith("record.json"), file)):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(file)

    def entries(self) -> Iterator[Entry]:
        with explained(self.uri, "list the store"):
            self._fs.invalidate_cache()
            found = self._fs.find(self._root, detail=True)
        for path, info in found.items():
            modified = info.get("LastModified") or info.get("mtime") or info.get("created") or info.get("updated")
            yield Entry(path[len(self._root) + 1 :], int(info["size"] or 0), _timestamp(modified))

    def _full(self, path: str) -> str:
        return f"{self._root}/{path}"

    @contextmanager
    def _writing(self, path: str) -> Iterator[None]:
        with explained(self.uri, f"write {path}"):
            try:
                yield
            except FileNotFoundError as error:
                raise StoreError(
                    f"`store.uri` (={redact(self.uri)}): could not write {path}: there is no such bucket. "
                    "Create it, or choose another `store.uri`"
                ) from error


def _timestamp(modified: datetime | float | None) -> float:
    """Return Unix seconds; a file of unknown age counts as new."""
    if isinstance(modified, datetime):
        return modified.timestamp()
    return float("inf") if modified is None else float(modified)
