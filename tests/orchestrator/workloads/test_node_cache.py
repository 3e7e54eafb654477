"""Node cache: files prepared once and mapped by all processes, repaired when damaged, and optional."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from orchestrator.core.errors import DataError
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.store import local_backend
from orchestrator.workloads import data_loading, node_cache
from orchestrator.workloads.data_sets import idx_files
from orchestrator.workloads.data_sets.idx_files import FILES, IdxSet

SOURCE = {"from": "here"}
MADE = {"images": torch.arange(64, dtype=torch.uint8).view(8, 8), "labels": torch.arange(3)}
linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

HOLDERS = """
import hashlib, json, multiprocessing, re, sys
import torch
from orchestrator.workloads import data_loading
from orchestrator.workloads.data_sets import idx_files

config, published = json.loads(sys.argv[1])
idx_files.MNIST = idx_files.IdxSet(**published)
read, calls = idx_files.read, []
idx_files.read = lambda *args: calls.append(args) or read(*args)

def kilobytes(pattern, path):
    with open(path) as file:
        return sum(map(int, re.findall(pattern + "([0-9]+) kB", file.read(), re.DOTALL)))

def digest(held):
    found = hashlib.sha256()
    for split in (held.train, held.val, held.test):
        for inputs, labels in split.batches(100, device=torch.device("cpu")):
            found.update(inputs.numpy())
            found.update(labels.numpy())
    return found.hexdigest()

def hold(barrier, answers):
    barrier.wait()
    before = kilobytes(r"\\bPss: +", "/proc/self/smaps_rollup")
    barrier.wait()
    held = data_loading.load(config)
    found = digest(held)
    barrier.wait()
    mapped = kilobytes(r"[.]safetensors\\n.*?\\bPss: +", "/proc/self/smaps")
    grown = kilobytes(r"\\bPss: +", "/proc/self/smaps_rollup") - before
    barrier.wait()
    answers.put([len(calls), found, 1024 * mapped, 1024 * grown])

digest(data_loading.load({"kind": "digits"}))  # what is imported late
fork = multiprocessing.get_context("fork")
barrier, answers = fork.Barrier(4), fork.SimpleQueue()
processes = [fork.Process(target=hold, args=(barrier, answers)) for _ in range(4)]
for process in processes:
    process.start()
print(json.dumps([answers.get() for _ in processes]))
for process in processes:
    process.join()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in a temporary directory, for a cache that stores tensors of any size."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(node_cache, "WORTHWHILE", 1)
    return tmp_path / f"pruning-orchestrator-{os.getuid()}"


class Maker:
    """Prepares `MADE` and counts the calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> dict[str, Tensor]:
        self.calls += 1
        return {name: tensor.clone() for name, tensor in MADE.items()}


def same(found: Any) -> bool:
    return found.keys() == MADE.keys() and all(torch.equal(found[name], MADE[name]) for name in MADE)


def publish(root: Path, monkeypatch: pytest.MonkeyPatch, train: int, test: int) -> tuple[IdxSet, list[Any]]:
    """Write random images as MNIST's files into `root`; return the set and its arrays."""
    (root / "random").mkdir(parents=True)
    rng = np.random.default_rng(0)
    arrays, sums = [], {}
    for name, shape in zip(FILES, [(train, 28, 28), (train,), (test, 28, 28), (test,)], strict=True):
        arrays.append(rng.integers(0, 256 if len(shape) > 1 else 10, shape, dtype=np.uint8))
        head = struct.pack(f">HBB{len(shape)}I", 0, 8, len(shape), *shape)
        content = gzip.compress(head + arrays[-1].tobytes(), compresslevel=0, mtime=0)
        (root / "random" / name).write_bytes(content)
        sums[name] = hashlib.md5(content, usedforsecurity=False).hexdigest()
    published = IdxSet("random", sums, ())
    monkeypatch.setattr(idx_files, "MNIST", published)
    return published, arrays


@pytest.mark.slow
@linux
def test_processes_of_a_node_prepare_a_set_once_and_hold_it_once(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, (train, train_labels, test, test_labels) = publish(tmp_path, monkeypatch, 38000, 2000)
    config = {"kind": "mnist", "root": str(tmp_path), "val_size": 3000}
    command = [sys.executable, "-W", "error", "-c", HOLDERS, json.dumps([config, vars(published)])]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    said = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True, timeout=100).stdout
    calls, digests, mapped, grown = zip(*json.loads(said), strict=True)

    order = torch.randperm(38000, generator=torch.Generator().manual_seed(0)).numpy()
    val, rest = np.sort(order[:3000]), np.sort(order[3000:])
    expected = hashlib.sha256()
    for pixels, labels in ((train[rest], train_labels[rest]), (train[val], train_labels[val]), (test, test_labels)):
        for start in range(0, len(labels), 100):
            some = pixels[start : start + 100].astype(np.float32)[:, None]
            expected.update((some / np.float32(255) - np.float32(0.1307)) / np.float32(0.3081))
            expected.update(labels[start : start + 100].astype(np.int64))
    size = train.nbytes + test.nbytes
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"]
    assert sum(calls) == 1
    assert set(digests) == {expected.hexdigest()}
    assert sum(mapped) == pytest.approx(size, rel=0.02)
    assert sorted(grown)[2] < size, "processes that map the file hold no float32 copy, four times the size"


def test_what_is_made_is_kept_for_the_user_alone(folder: Path) -> None:
    make = Maker()

    assert all(same(node_cache.shared(SOURCE, make)) for _ in range(3))
    assert make.calls == 1
    assert same(node_cache.shared({"from": "elsewhere"}, make))
    assert make.calls == 2
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in folder.iterdir()] == [0o600, 0o600]


def test_small_tensors_are_not_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "WORTHWHILE", 1000)

    assert same(node_cache.shared(SOURCE, Maker()))
    assert not list(folder.iterdir())


def test_small_tensors_that_take_long_are_written_as_their_kind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "WORTHWHILE", 1000)
    monkeypatch.setattr(node_cache, "LONG", 0.0)
    monkeypatch.setattr(local_backend, "KEPT", 2)
    for place in range(4):
        node_cache.shared({"from": place}, Maker())
        node_cache.shared({"from": place}, Maker(), node_cache.STATISTICS)

    assert sorted(path.suffix for path in folder.iterdir()) == [".safetensors"] * 2 + [".statistics"] * 4
    assert same(node_cache.shared({"from": 0}, pytest.fail, node_cache.STATISTICS))


@linux
def test_room_to_prepare_in_is_a_file_of_no_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = node_cache.room((3, 4096)).fill_(7)

    assert str(folder) in Path("/proc/self/maps").read_text()
    assert not list(folder.iterdir())
    assert held.sum() == 3 * 4096 * 7
    monkeypatch.setattr(os, "posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert node_cache.room((2, 3)).shape == (2, 3)
    assert not list(folder.iterdir())


@pytest.mark.parametrize("where", [0, 20, -30, -1])
def test_a_damaged_file_is_made_again(where: int, folder: Path) -> None:
    make = Maker()
    node_cache.shared(SOURCE, make)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    changed = bytearray(whole)
    changed[where] ^= 1
    for content in (bytes(changed), whole[:where], b"", b"\xff" * 99):
        calls = make.calls
        path.write_bytes(content)
        assert same(node_cache.shared(SOURCE, make))
        assert (path.read_bytes(), make.calls) == (whole, calls + 1)


def test_writing_to_the_tensors_changes_nobody_elses() -> None:
    first, second = (node_cache.shared(SOURCE, Maker()) for _ in range(2))
    first["images"].zero_()

    assert same(second)
    assert same(node_cache.shared(SOURCE, pytest.fail))


@pytest.mark.parametrize("obstacle", ["file", "link", "open to others", "another user's", "no directory", "Windows"])
def test_without_a_directory_that_is_ours_alone_nothing_is_kept(
    obstacle: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if obstacle == "file":
        folder.touch()
    elif obstacle == "link":
        (folder.parent / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(folder.parent / "elsewhere")
    elif obstacle == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif obstacle == "another user's":
        uid = os.getuid() + 1
        monkeypatch.setattr(os, "getuid", lambda: uid)
        Path(folder.parent, f"pruning-orchestrator-{uid}").mkdir(mode=0o700)
    elif obstacle == "no directory":
        monkeypatch.setattr(tempfile, "tempdir", str(folder / "absent"))
    else:
        monkeypatch.setattr(sys, "platform", "win32")
    make = Maker()

    assert same(node_cache.shared(SOURCE, make))
    assert same(node_cache.shared(SOURCE, make))
    assert make.calls == 2
    assert not list(folder.parent.rglob("*.safetensors"))


def test_a_full_disk_costs_nothing_but_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as context:
        context.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=50))
        assert same(node_cache.shared(SOURCE, Maker()))
    for error in (OSError(28, "No space left on device"), SafetensorError("I/O error")):

        def fill(tensors: Any, file: BinaryIO, metadata: Any, error: Exception = error) -> None:
            file.write(b"begun")
            raise error

        monkeypatch.setattr(node_cache, "write_state", fill)
        assert same(node_cache.shared(SOURCE, Maker()))
    assert not list(folder.iterdir())


def test_a_read_only_directory_serves_what_it_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node_cache.shared(SOURCE, Maker())

    def refuse(*args: Any, **options: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(node_cache, "write_state", refuse)
    assert same(node_cache.shared(SOURCE, pytest.fail))
    assert same(node_cache.shared({"from": "elsewhere"}, Maker()))


def test_the_turn_of_a_killed_process_ends_and_that_of_a_hung_one_is_not_awaited_for_ever(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.mkdir(mode=0o700)
    lock = folder / f".{digest(canonical_json([node_cache.FORMAT, SOURCE]))}.lock"
    script = f"import fcntl, os, time; fcntl.flock(os.open({str(lock)!r}, os.O_CREAT), fcntl.LOCK_EX); print(); "
    with subprocess.Popen([sys.executable, "-c", script + "time.sleep(60)"], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        started = time.monotonic()
        assert same(node_cache.shared({"from": "elsewhere"}, Maker())), "another source has its own turn"
        assert time.monotonic() - started < 10
        monkeypatch.setattr(node_cache, "WORTHWHILE", 1000)
        assert same(node_cache.shared(SOURCE, Maker(), replace(node_cache.DATA, patience=0.1)))
        holder.send_signal(signal.SIGKILL)

    monkeypatch.setattr(node_cache, "WORTHWHILE", 1)
    started = time.monotonic()
    assert same(node_cache.shared(SOURCE, Maker()))
    assert time.monotonic() - started < 10
    assert [path.suffix for path in folder.iterdir()] == [".safetensors"] * 2


def test_what_came_while_waiting_is_taken(folder: Path) -> None:
    impatient = replace(node_cache.DATA, patience=0.0)

    def make() -> dict[str, Tensor]:
        node_cache.shared(SOURCE, Maker(), impatient)  # another process is faster
        return {"other": torch.zeros(9)}

    assert same(node_cache.shared(SOURCE, make, impatient))
    assert len(list(folder.iterdir())) == 1


def test_files_used_longest_ago_and_what_killed_processes_left_are_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_backend, "KEPT", 2)
    first, second = (node_cache.shared({"from": name}, Maker()) for name in ("a", "b"))
    for age, path in zip((500, 400), sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime), strict=True):
        os.utime(path, (time.time() - age,) * 2)
    node_cache.shared({"from": "a"}, pytest.fail)
    for name, old in ((".young", 0.0), (".old", 2 * local_backend.ABANDONED)):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - old,) * 2)

    node_cache.shared({"from": "c"}, Maker())

    for name in ("a", "c"):
        node_cache.shared({"from": name}, pytest.fail)
    assert len(list(folder.glob("*.safetensors"))) == 2
    assert [path.name for path in folder.glob(".*")] == [".young"]
    assert same(first)
    assert same(second), "a mapped file stays readable after its removal"


def test_a_source_file_that_has_changed_is_read_and_checked_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, monkeypatch, 30, 10)
    config = {"kind": "mnist", "root": str(tmp_path), "val_size": 5}
    for seed in range(2):
        data_loading.load({**config, "split_seed": seed})
    assert len(list(folder.iterdir())) == 1

    path = tmp_path / "random" / FILES[1]
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataError, match=re.escape(f"{path} has MD5")):
        data_loading.load({**config, "split_seed": 2})


@linux
def test_a_process_holds_its_last_four_sets_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(tmp_path, monkeypatch, 300, 10)
    data_loading._load.cache_clear()
    for seed in range(9):
        data_loading.load({"kind": "mnist", "root": str(tmp_path), "val_size": 5, "split_seed": seed})

    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 4
