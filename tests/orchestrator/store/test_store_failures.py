"""Errors of a store that cannot be used; a failed operation leaves nothing half done."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from store_cases import FILES, Content, chain, fresh, key_of, record_for, record_of

from orchestrator.core.errors import StoreError
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.plain_data import digest
from orchestrator.core.records import FileInfo
from orchestrator.core.specs import Plan
from orchestrator.store import local_backend, object_backend
from orchestrator.store.backends import seal
from orchestrator.store.finished_stages import StageDamaged
from orchestrator.store.store import Store

HERE = Path(__file__).parents[1]
KEY = key_of(0)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, with the names of `store_cases` imported."""
    environment = {"PYTHONPATH": f"{HERE}:{HERE.parent.parent}"}
    line = [
        sys.executable,
        "-c",
        f"import sys\nfrom store_cases import *\nfrom orchestrator.store.store import Store\n{code}",
        *arguments,
    ]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Function that mounts a small file system in memory, if mounting is permitted."""
    mounted: list[Path] = []

    def mounting(options: str) -> Path:
        path = tmp_path / "mounted"
        path.mkdir(exist_ok=True)
        try:
            done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True)
        except FileNotFoundError:
            pytest.skip("there is no mount command")
        if done.returncode:
            pytest.skip("mounting a file system is not permitted here")
        mounted.append(path)
        return path

    yield mounting
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_said_plainly_and_nothing_is_lost(mount: Callable[[str], Path]) -> None:
    store = Store(str(mount("size=256k")))
    store.commit(record_of(KEY), FILES)
    with pytest.raises(StoreError, match=r"`store\.uri` \(=.*could not write stages/.*disk or quota is full.*prune"):
        store.commit(record_of(key_of(1)), {WEIGHTS: Content(b"x" * 500_000)})
    assert list(store.finished([KEY, key_of(1)])) == [KEY]
    assert store.backend.names("tmp") == []
    store.commit(record_of(key_of(1)), FILES)
    assert store.read(key_of(1), WEIGHTS) == FILES[WEIGHTS]


def test_a_read_only_file_system_can_be_read(mount: Callable[[str], Path]) -> None:
    path = mount("size=1m")
    store = Store(str(path))
    store.commit(record_of(KEY), FILES)
    store.commit(record_of(key_of(2)), FILES)
    (path / "stages" / key_of(2) / WEIGHTS).write_bytes(b"short")
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    assert fresh(store).read(KEY, WEIGHTS) == FILES[WEIGHTS]
    for write in (lambda: store.commit(record_of(key_of(1)), FILES), lambda: store.save_sweep("s", {})):
        with pytest.raises(StoreError, match="the file system is read-only"):
            write()
    assert list(store.finished([KEY, key_of(2)])) == [KEY]  # damaged, and cannot be set aside
    with pytest.raises(StoreError, match=r"is damaged.*could not be set aside.*read-only"):
        store.read(key_of(2), WEIGHTS)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOSPC, "disk or quota is full"),
        (errno.EDQUOT, "disk or quota is full"),
        (errno.EROFS, "the file system is read-only"),
        (errno.EACCES, "permission denied for user"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_failure_while_syncing_commits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, sentence: str
) -> None:
    store = Store(str(tmp_path))

    def fail(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(local_backend.os, "fsync", fail)
        with pytest.raises(StoreError, match=sentence):
            store.commit(record_of(KEY), FILES)
    assert store.finished([KEY]) == {}
    assert store.backend.names("tmp") == store.backend.names("stages") == []
    store.commit(record_of(KEY), FILES)


def test_a_file_size_limit_is_said(tmp_path: Path) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
try:
    Store(sys.argv[1]).commit(record_of(key_of(0)), FILES)
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run(code, str(tmp_path)).stdout
    assert said.startswith("StoreError")
    assert "larger than this process may write; raise the limit (`ulimit -f`)" in said
    assert Store(str(tmp_path)).finished([KEY]) == {}


def test_missing_rights_are_said(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    code = """
import os
if os.getuid() == 0:
    os.setuid(65534)  # root may write anywhere
try:
    Store(sys.argv[1]).commit(record_of(key_of(0)), FILES)
except Exception as error:
    print(type(error).__name__, error)
"""
    said = run(code, str(locked)).stdout
    assert said.startswith("StoreError `store.uri` (=")
    assert "permission denied for user" in said
    assert "Grant it, or choose another `store.uri`" in said


def test_a_root_that_is_a_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for uri in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="is a file, not a directory"):
            Store(str(uri)).commit(record_of(KEY), FILES)


def test_a_link_out_of_the_store_is_not_followed(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "store"))
    store.commit(record_of(KEY), FILES)
    outside = tmp_path / "outside"
    outside.write_bytes(FILES[WEIGHTS])
    weights = tmp_path / "store" / "stages" / KEY / WEIGHTS
    weights.unlink()
    weights.symlink_to(outside)
    with pytest.raises(StageDamaged, match=rf"{WEIGHTS} is damaged: .*found no such file"):
        store.read(KEY, WEIGHTS)
    assert outside.read_bytes() == FILES[WEIGHTS]


def test_a_store_may_itself_be_behind_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = Store(str(tmp_path / "link"))
    store.commit(record_of(KEY), FILES)
    assert store.read(KEY, WEIGHTS) == FILES[WEIGHTS]


def test_a_file_system_without_hard_links_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str, target: str) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(local_backend.os, "link", refuse)
    store = Store(str(tmp_path))
    assert store.backend.create("a/b", b"1")
    assert not store.backend.create("a/b", b"2")
    assert store.backend.read("a/b") == b"1"
    assert store.backend.names("tmp") == []


@pytest.mark.parametrize(
    ("uri", "sentence"),
    [
        ("nosuch://x", r"`store\.uri` \(=nosuch://x\) must be a path or an fsspec URI"),
        ("simplecache::s3://bucket/x", "chained file systems are not supported"),
        ("", "must name a directory"),
        (
            "s3:/bucket/x",
            r"\(=s3:/bucket/x\) must have two slashes behind its protocol; type s3://bucket/x, or \./s3:/",
        ),
        ("file:/bucket/x", r"type /bucket/x, or \./file:/bucket/x for a directory of that name"),
    ],
)
def test_a_uri_of_no_use_is_refused_at_once(uri: str, sentence: str) -> None:
    with pytest.raises(StoreError, match=sentence):
        Store(uri)


@pytest.mark.parametrize(("protocol", "extra"), [("s3", "s3"), ("gs", "gcs")])
def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch, protocol: str, extra: str) -> None:
    import fsspec

    def missing(name: str) -> None:
        raise ImportError(f"Install the package of {name}")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(StoreError, match=rf"pip install 'pruning-orchestrator\[{extra}\]'"):
        Store(f"{protocol}://bucket/x")


def test_relative_paths_are_made_absolute_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store("runs/store")
    assert store.uri == str(tmp_path / "runs" / "store")
    assert Store(f"file://{tmp_path}/x").uri == Store(str(tmp_path / "x")).uri
    assert Store("~/x").uri == os.path.expanduser("~/x")
    monkeypatch.chdir("/")
    store.commit(record_of(KEY), FILES)
    assert (tmp_path / "runs" / "store" / "stages" / KEY / "record.json").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "runs"]


def test_looking_into_a_store_that_is_not_there_makes_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path / "none"))
    assert store.finished([KEY]) == {}
    assert store.sweeps() == []
    assert not (tmp_path / "none").exists()


def test_a_bucket_that_is_not_there_is_said(s3: dict[str, object]) -> None:
    store = Store("s3://no-such-bucket/x", options=s3)
    assert store.finished([KEY]) == {}
    with pytest.raises(StoreError, match="the bucket does not exist"):
        store.commit(record_of(KEY), FILES)


def test_an_object_store_that_is_away_is_said(s3: dict[str, object]) -> None:
    away = {**s3, "endpoint_url": "http://127.0.0.1:9", "config_kwargs": {"retries": {"max_attempts": 0}}}
    store = Store("s3://bucket/x", options=away | {"retries": 1})
    with pytest.raises(StoreError, match=r"`store\.uri` \(=s3://bucket/x\): could not read.*Check the address"):
        store.finished([KEY])


def test_missing_credentials_are_said(s3: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    store = Store("s3://bucket/x", options={"endpoint_url": s3["endpoint_url"], "skip_instance_cache": True})
    with pytest.raises(StoreError, match="no credentials found"):
        store.commit(record_of(KEY), FILES)


def test_a_lost_acknowledgement_is_no_defeat(s3: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """The record was written, the reply lost and the client's retry refused: the commit is still ours."""
    store = Store("s3://bucket/lost", options=s3)
    backend = store.backend
    assert isinstance(backend, object_backend.ObjectBackend)
    pipe = backend._fs.pipe_file

    def twice(path: str, data: bytes, **options: object) -> None:
        pipe(path, data, **options)
        if path.endswith("record.json"):
            pipe(path, data, **options)

    monkeypatch.setattr(backend._fs, "pipe_file", twice)
    assert store.commit(record_of(KEY, attempt=3), FILES).attempt == 3
    assert fresh(store).read(KEY, WEIGHTS) == FILES[WEIGHTS]


def test_the_store_loads_nothing_heavy() -> None:
    code = """
Store(sys.argv[1]).finished([key_of(0)])
print(sorted({"torch", "ray", "mlflow", "hydra", "fsspec", "numpy"} & set(sys.modules)))
"""
    assert run(code, "/nonexistent").stdout == "[]\n"


@pytest.mark.slow
def test_a_thousand_stages_are_looked_up_in_a_second(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(str(tmp_path))
    stages = {spec.key: spec for trial in range(250) for spec in chain(1, 2, 3, seed=trial)}
    described = {name: FileInfo(digest(data), len(data)) for name, data in FILES.items()}
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    for key, spec in stages.items():  # the files that `commit` writes, without its syncs
        folder = tmp_path / "stages" / key
        folder.mkdir(parents=True)
        record = record_for(spec, files=described)
        (folder / "record.json").write_bytes(seal({"attempt": "", "record": record.to_json()}))
        for name in FILES:
            (folder / name).hardlink_to(tmp_path / name)

    def looked_up() -> float:
        start = time.process_time()
        assert len(fresh(store).resumable(Plan(stages, ()))) == 1000
        return time.process_time() - start

    seconds = [looked_up() for _ in range(2)]
    with capsys.disabled():
        print(f"\n1,000 stages looked up in {min(seconds):.2f} s", end=" ")
    assert min(seconds) < 1.25


@pytest.mark.parametrize("below", ["", "/deeper"])
def test_a_link_that_leads_nowhere_is_named(tmp_path: Path, below: str) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "gone")
    store = Store(f"{link}{below}")

    with pytest.raises(StoreError, match=rf"`store.uri` \(={store.uri}\) .*is a link to {tmp_path}/gone, which does"):
        store.commit(record_of(KEY), FILES)
    (tmp_path / "gone").mkdir()
    assert store.commit(record_of(KEY), FILES).key == KEY
