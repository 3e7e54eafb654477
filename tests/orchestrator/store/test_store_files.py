"""Files of any size are streamed to and from a store, verified, and leave nothing behind on the node."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import pytest
from store_cases import FILES, Content, altered, fresh, key_of, record_of

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.store import local_backend
from orchestrator.store.finished_stages import StageDamaged
from orchestrator.store.object_backend import ObjectBackend
from orchestrator.store.retention import verify
from orchestrator.store.store import Store

KEY = key_of(0)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The node folder, in the test's own temporary directory."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"pruning-orchestrator-{os.getuid()}"


def path_of(store: Store, name: str = WEIGHTS) -> str:
    commit = store.stages.standing(KEY)
    assert commit is not None
    return commit.path(name)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_file_is_fetched_as_it_was_committed(store: Store, folder: Path) -> None:
    record = store.commit(record_of(KEY), FILES)
    for name, content in FILES.items():
        path = fresh(store).fetch(KEY, name)
        assert path.read_bytes() == content
        assert fresh(store).fetch(KEY, name) == path
    if "://" in store.uri:
        assert names(folder) == sorted(f"{info.sha256}.fetched" for info in record.files.values())
    else:
        assert path == Path(store.uri, path_of(store, name))
        assert names(folder) == []


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing"])
def test_a_damaged_file_is_not_fetched(store: Store, folder: Path, damage: str) -> None:
    store.commit(record_of(KEY), FILES)
    path = path_of(store)
    if damage == "missing":
        store.backend.remove(path)
    else:
        store.backend.write(path, altered(FILES)[WEIGHTS] if damage == "flipped" else FILES[WEIGHTS][:-1])
    with pytest.raises(StageDamaged, match=rf"{WEIGHTS} is damaged: expected {len(FILES[WEIGHTS])} bytes.*found"):
        store.fetch(KEY, WEIGHTS)
    assert store.finished([KEY]) == {}
    assert names(folder) == []


def test_verifying_looks_at_the_store_and_not_at_what_was_fetched(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    store.fetch(KEY, WEIGHTS)
    assert verify(store) == []
    store.backend.write(path_of(store), altered(FILES)[WEIGHTS])
    (damage,) = verify(store)
    assert f"{WEIGHTS} is damaged" in damage


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_copy_on_the_node_that_was_altered_is_fetched_again(store: Store) -> None:
    store.commit(record_of(KEY), FILES)
    store.fetch(KEY, WEIGHTS).write_bytes(altered(FILES)[WEIGHTS])
    assert store.fetch(KEY, WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert store.finished([KEY])


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_copies_on_the_node_are_few_but_those_just_fetched_stay(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_backend, "KEPT", 1)
    store.commit(record_of(KEY), {name: Content(name.encode()) for name in ("a", "b", "c", "d")})
    first, second, third = (store.fetch(KEY, name) for name in ("a", "b", "c"))
    for path, age in ((first, 300), (second, 200)):
        os.utime(path, (time.time() - age,) * 2)
    (folder / ".left").touch()
    os.utime(folder / ".left", (0, 0))
    fourth = store.fetch(KEY, "d")
    assert names(folder) == sorted(path.name for path in (third, fourth))


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_a_node_without_a_folder_of_the_users_own_will_do(store: Store, folder: Path) -> None:
    folder.touch()
    store.commit(record_of(KEY), FILES)
    assert store.fetch(KEY, WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize("store", ["memory"], indirect=True)
def test_what_goes_missing_on_the_node_is_no_damage_of_the_store(
    store: Store, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit(record_of(KEY), FILES)
    backend = store.backend
    assert isinstance(backend, ObjectBackend)

    def lose(*_: object) -> None:
        shutil.rmtree(folder)
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    with monkeypatch.context() as patch:
        patch.setattr(backend._fs, "get_file", lose)
        with pytest.raises(StoreError, match="was removed") as refused:
            store.fetch(KEY, WEIGHTS)
    assert not isinstance(refused.value, StageDamaged)
    assert store.fetch(KEY, WEIGHTS).read_bytes() == FILES[WEIGHTS]


def fill(file: BinaryIO) -> None:
    file.write(bytes(100_000))
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail(file: BinaryIO) -> None:
    file.write(bytes(100_000))
    raise RuntimeError("the device is gone")


def turn_back(file: BinaryIO) -> None:
    file.write(b"12")
    file.seek(0)


@pytest.mark.parametrize(
    ("writer", "error", "sentence"),
    [
        (fill, StoreError, r"`store\.uri` \(=.*the disk or quota is full"),
        (fail, RuntimeError, "^the device is gone$"),
        (turn_back, StoreError, "cannot be written out of order"),
    ],
)
def test_a_writer_that_fails_commits_nothing_and_leaves_nothing(
    store: Store, folder: Path, writer: Callable[[BinaryIO], None], error: type[Exception], sentence: str
) -> None:
    files = {"masks.safetensors": FILES["masks.safetensors"], WEIGHTS: writer}
    with pytest.raises(error, match=sentence):
        store.commit(record_of(KEY), files)
    assert store.finished([KEY]) == {}
    assert store.backend.names("tmp") == names(folder) == []
    assert store.commit(record_of(KEY), FILES).files.keys() == FILES.keys()


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_file_of_several_parts_arrives_whole(store: Store) -> None:
    content = Content(bytes(range(256)) * (17 * 2**20 // 256))
    store.commit(record_of(KEY), {WEIGHTS: content})
    assert store.fetch(KEY, WEIGHTS).read_bytes() == content
    assert store.read(KEY, WEIGHTS) == content
    assert verify(store) == []
