"""The commit protocol of a store: a finished stage is whole, with digests of all its files.

The files are parsed in memory bounded by the store's own size. The digest in a record does not make a file trustworthy:
whoever wrote the file could write the record, too.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from orchestrator.core.errors import OrchestratorError, StageMissing, StoreError
from orchestrator.core.file_names import DROPPABLE, MASKS, RECORD, WEIGHTS, component, is_component
from orchestrator.core.plain_data import canonical_json, digest, parse_json, quoted, read_as
from orchestrator.core.records import FileInfo, StageRecord
from orchestrator.core.work_order import FileWriter
from orchestrator.store.backends import Backend, seal, store_logger, unseal

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Masks = Mapping[str, NDArray[np.bool_]]

MOST_HEADER = 2**25
"""Largest accepted header of a safetensors file in bytes: some 200,000 tensors."""
MOST_ENTRIES = 2**27
"""Largest accepted number of mask entries, unless the stage's weights have more bytes than that."""


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, mapped from the file.

    Raises:
        ValueError: the file is damaged or of another format
    """
    from safetensors.torch import load_file

    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    try:
        if header > MOST_HEADER:
            raise ValueError(f"its header has {header} bytes, more than {MOST_HEADER}")
        return load_file(path)
    except Exception as error:  # safetensors raises its own errors, and torch others for unknown dtypes and shapes
        raise ValueError(f"no tensors can be read: {_short(error)}") from error


def masks_in(content: bytes, record: StageRecord, most: int = MOST_ENTRIES) -> Masks:
    """Return the masks of a stage from the content of their file, after checking their sizes against the record.

    Args:
        content: the file; it is compressed, so a few bytes can hold any number of equal entries
        record: the stage's record
        most: largest number of entries to allocate memory for

    Raises:
        ValueError: the file is damaged, or its tensors differ from the record's
        StoreError: the record has more entries than `most`
    """
    from pruning.masks import mask_files  # without torch, whose import costs the driver two seconds

    sizes = record.tensor_sizes
    if (entries := sum(sizes.values())) > most:
        raise StoreError(
            f"the masks of stage {record.key[:12]} have {entries} entries by their record, and at most {most} are read "
            "unless the stage keeps its weights; run the sweep with store.keep=all and a new `store.uri`"
        )

    def check(name: str, shape: Sequence[int]) -> None:
        if math.prod(shape) != sizes.get(name):
            raise ValueError(
                f"the mask of `{name}` has {math.prod(shape)} entries, and the record says {sizes.get(name)}"
            )

    try:
        return mask_files.decode(mask_files.read_npz(content), check)[0]
    except ValueError as error:
        raise ValueError(f"no masks can be read: {_short(error)}") from error


def values_in(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a file; raise ValueError if the file holds anything else."""
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


def _short(error: Exception) -> str:
    """Return the first 200 characters of an error message, which may quote names of any length."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__


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


_REQUESTS = 32
"""Number of stages that are examined in parallel on an object store."""

_T = TypeVar("_T")
_Parsed = TypeVar("_Parsed")

_log = store_logger(__name__)


class StageDamaged(StageMissing):
    """A file of a finished stage differs from its record; the next run repeats the stage."""


class Stages:
    """Finished stages in a backend.

    Args:
        backend: where the bytes lie
        name: the store's name in messages
        read_only: leave damaged stages where they are
    """

    def __init__(self, backend: Backend, name: str, read_only: bool = False) -> None:
        self._backend, self._name, self._read_only = backend, name, read_only

    def standing(self, key: str) -> Commit | None:
        """Return the commit of a stage, or None. A damaged stage is set aside and named in a warning."""
        try:
            return self._examine(key)
        except StageDamaged as error:
            _log.warning("%s", error)
            return None

    def known(self) -> list[str]:
        """Return the keys of all stages that may be committed; folders whose name is not a key are ignored."""
        return [name for name in self._backend.names("stages") if is_component(name)]

    def all_standing(self, keys: Iterable[str]) -> dict[str, Commit]:
        """Return the commits of those `keys` that have one, as `standing` does."""
        found = self._each(self.standing, dict.fromkeys(keys))
        return {commit.key: commit for commit in found if commit is not None}

    def commit(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord:
        """Commit a stage unless it is committed; put dropped weights back; return the record that stands."""
        for name in files:
            check_name(name)
        # The record as readers will see it; a record that nobody could read is refused here.
        record = parse(self._sealed(Commit(record, "")), record.key).record
        for _ in range(5):
            standing = self.standing(record.key)
            if standing is None:
                if (committed := self._publish(record, files)) is not None:
                    return committed
            elif standing.record.started_from != record.started_from:
                self._set_aside(record.key, "its parent was repeated, and has other weights now")
            elif WEIGHTS in standing.record.files or WEIGHTS not in files:
                return standing.record
            elif canonical_json(standing.record.result()) == canonical_json(record.result()):
                return self._put_back(standing, files)
            else:
                self._set_aside(record.key, "its weights had been dropped, and repeating it gave another result")
        raise StoreError(
            f"{self._name}: other processes kept changing {folder_of(record.key)} while it was written; run the same "
            "command again"
        )

    def read(self, key: str, name: str) -> bytes:
        """Return the content of a small file of a finished stage, with its digest checked."""
        return self._verified(key, name, self._small)[0]

    def fetch(self, key: str, name: str) -> Path:
        """Return the path on this node of a file of a finished stage, with its digest checked."""
        return self._verified(key, name, self._backend.fetch)[0]

    def tensors(self, key: str, name: str) -> dict[str, Tensor]:
        """Return the tensors of a file of a finished stage by name, mapped from the file."""
        return self._parsed(key, name, self._backend.fetch, lambda path, _: tensors_in(path))

    def values(self, key: str, name: str) -> dict[str, Any]:
        """Return the JSON object in a file of a finished stage."""
        return self._parsed(key, name, self._small, lambda content, _: values_in(content))

    def masks(self, key: str) -> Masks:
        """Return the masks of a finished round by the names of their parameters."""

        def parser(content: bytes, commit: Commit) -> Masks:
            return masks_in(content, commit.record, self._most_entries(commit))

        return self._parsed(key, MASKS, self._small, parser)

    def check(self, key: str) -> None:
        """Read every file of a stage; raise StageDamaged for the first that is damaged."""
        commit = self._examine(key)
        if commit is None and not self._backend.remote:  # a directory publishes a stage together with its record
            raise self._damaged(key, RECORD, "found no such file")
        for name in commit.record.files if commit else ():
            self._verified(key, name, lambda path, _: (None, self._backend.describe(path)))

    def _most_entries(self, commit: Commit) -> int:
        """Return the limit on mask entries to read: MOST_ENTRIES, or the bytes of the stage's weights if larger."""
        with suppress(FileNotFoundError):
            if WEIGHTS in commit.record.files and commit.record.prunable_parameters > MOST_ENTRIES:
                return max(MOST_ENTRIES, self._backend.size(commit.path(WEIGHTS)))
        return MOST_ENTRIES

    def _small(self, path: str, info: FileInfo) -> tuple[bytes, FileInfo]:
        data = self._backend.read(path, info.bytes)
        return data, FileInfo(digest(data), len(data))

    def _parsed(
        self,
        key: str,
        name: str,
        get: Callable[[str, FileInfo], tuple[_T, FileInfo]],
        parser: Callable[[_T, Commit], _Parsed],
    ) -> _Parsed:
        """Parse a file of a finished stage after its digest was checked.

        A file that the parser refuses is damaged even if its digest is right: whoever can write the file can write a
        record with its digest.
        """
        content, commit = self._verified(key, name, get)
        try:
            return parser(content, commit)
        except ValueError as error:
            reason = str(error)
        if self._examine(key) != commit:  # another process has just repeated the stage
            return self._parsed(key, name, get, parser)
        raise self._damaged(key, name, reason)

    def _verified(self, key: str, name: str, get: Callable[[str, FileInfo], tuple[_T, FileInfo]]) -> tuple[_T, Commit]:
        """Return a file of a finished stage, read by `get`, and the commit; raise if the digest is not the record's."""
        check_name(name)
        commit = self._examine(key)
        if commit is None:
            raise StageMissing(f"{self._name}: stage {key} is not finished; run its sweep again", key)
        if name not in commit.record.files:
            reason = (
                "its weights were dropped; a run that needs them repeats the stage"
                if name in DROPPABLE
                else "the stage never had it"
            )
            raise StageMissing(f"{self._name}: no {name} in stage {key}: {reason}", key)
        expected = commit.record.files[name]
        try:
            content, info = get(commit.path(name), expected)
            if info == expected:
                return content, commit
            found = _described(info)
        except FileNotFoundError:
            found = "no such file"
        if self._examine(key) != commit:  # another process has just dropped the weights or repeated the stage
            return self._verified(key, name, get)
        raise self._damaged(key, name, f"expected {_described(expected)}, found {found}")

    def drop_weights(self, keys: Iterable[str]) -> None:
        """Delete weights and training states of finished stages, after removing them from the records."""
        self._each(self._drop_weights, keys)

    def _drop_weights(self, key: str) -> None:
        commit = self._examine(key)
        if commit is not None and WEIGHTS in commit.record.files:
            files = {name: info for name, info in commit.record.files.items() if name not in DROPPABLE}
            self._rewrite(Commit(replace(commit.record, files=files), commit.attempt))
            for name in commit.record.files.keys() - files.keys():
                self._backend.remove(commit.path(name))

    def _each(self, act: Callable[[str], _T], keys: Iterable[str]) -> list[_T]:
        """Call a function for many stages, in parallel if the backend is remote."""
        if not self._backend.remote:
            return [act(key) for key in keys]
        with ThreadPoolExecutor(_REQUESTS) as pool:
            return list(pool.map(act, keys))

    def _publish(self, record: StageRecord, files: Mapping[str, FileWriter]) -> StageRecord | None:
        """Write a stage and return its record, or None if another process was faster."""
        folder, attempt = folder_of(record.key), uuid.uuid4().hex if self._backend.remote else ""

        def with_files(found: Mapping[str, FileInfo]) -> StageRecord:
            return replace(record, files={name: found[join(attempt, name)] for name in files})

        writers = {join(attempt, name): writer for name, writer in files.items()}
        found = self._backend.publish(folder, writers, lambda found: self._sealed(Commit(with_files(found), attempt)))
        if found is not None:
            return with_files(found)
        standing = self.standing(record.key)
        if not attempt:
            if standing is None:
                self._set_aside(record.key, "a folder without a record")
        elif standing is not None and standing.attempt == attempt:
            return standing.record  # our write succeeded but its reply was lost, and the retry was refused
        else:
            self._backend.remove_folder(f"{folder}/{attempt}")
        return None

    def _put_back(self, commit: Commit, files: Mapping[str, FileWriter]) -> StageRecord:
        dropped = [name for name in DROPPABLE if name in files and name not in commit.record.files]
        put = {name: self._backend.put(commit.path(name), files[name]) for name in dropped}
        record = replace(commit.record, files={**commit.record.files, **put})
        self._rewrite(Commit(record, commit.attempt))
        return record

    def _rewrite(self, commit: Commit) -> None:
        self._backend.write(f"{folder_of(commit.key)}/{RECORD}", self._sealed(commit))

    def _sealed(self, commit: Commit) -> bytes:
        try:
            content = seal({"attempt": commit.attempt, "record": commit.record.to_json()})
            parse(content, commit.key)
        except ValueError as error:
            raise StoreError(
                f"the record of stage {commit.key} holds NaN, an infinity or other values that are not allowed: {error}"
            ) from error
        return content

    def _examine(self, key: str) -> Commit | None:
        """Return the commit of a stage, or None; set a damaged stage aside and raise StageDamaged."""
        try:
            content = self._backend.read(f"{folder_of(key)}/{RECORD}")
        except FileNotFoundError:
            return None
        try:
            commit = parse(content, key)
        except ValueError as error:
            raise self._damaged(key, RECORD, str(error)) from None
        except OrchestratorError as error:
            raise StoreError(f"{self._name}: {folder_of(key)}/{RECORD}: {error}") from None
        if not self._backend.remote and (wrong := self._wrong_size(commit)):
            if self._changed(key, content):
                return self._examine(key)
            raise self._damaged(key, *wrong)
        return commit

    def _wrong_size(self, commit: Commit) -> tuple[str, str] | None:
        for name, info in commit.record.files.items():
            try:
                found = self._backend.size(commit.path(name))
            except FileNotFoundError:
                return name, f"expected {info.bytes} bytes, found no such file"
            if found != info.bytes:
                return name, f"expected {info.bytes} bytes, found {found}"
        return None

    def _changed(self, key: str, content: bytes) -> bool:
        try:
            return self._backend.read(f"{folder_of(key)}/{RECORD}") != content
        except FileNotFoundError:
            return True

    def _damaged(self, key: str, name: str, found: str) -> StageDamaged:
        damage = f"stage {key}: {name} is damaged: {found}"
        if self._read_only:
            return StageDamaged(f"{self._name}: {damage}. The next run sets it aside and repeats it", key)
        try:
            where = f"The stage was set aside in {self._set_aside(key, damage)}; the next run repeats it"
        except StoreError as error:
            where = f"The stage could not be set aside ({error})"
        return StageDamaged(f"{self._name}: {damage}. {where}", key)

    def _set_aside(self, key: str, reason: str) -> str:
        target = f"quarantine/{component(key, 'key')}-{uuid.uuid4().hex[:8]}"
        self._backend.move(folder_of(key), target)
        self._backend.write(f"{target}/reason.txt", f"{reason}\n".encode())
        return target


def _described(info: FileInfo) -> str:
    return f"{info.bytes} bytes of SHA-256 {info.sha256}"
