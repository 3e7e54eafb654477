"""The kernels are compiled once for a user, loaded only if nobody else can have written them, and can be missing."""

from __future__ import annotations

import hashlib
import os
import pwd
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import pruning
from pruning.kernels import compiling, library
from pruning.kernels.compiling import KernelsUnavailable, library_file

FIRST = 15.0
"""Seconds that the first use may take."""
ROOT = Path(pruning.__file__).parent.parent
LOADING = """
import sys, time, torch
from pruning.kernels.library import library
start = time.perf_counter()
library().has_lookup()
print(time.perf_counter() - start)
"""

Compiler = Callable[[str], Path]


@pytest.fixture(scope="session")
def compiled() -> Path:
    """A file with the library's true content."""
    return library_file()[0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a compiler that copies the library; return the folder of libraries, which is missing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "pruning-orchestrator" / "kernels"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> Compiler:
    """Set CC to a script that runs a command with `$target` as the file to write, and counts its calls."""

    def write(command: str) -> Path:
        script, calls = tmp_path / "cc", tmp_path / "calls"
        script.write_text(
            f'#!/bin/sh\n[ "$1" = --version ] && {{ echo 1.0; exit; }}\necho "$*" >> {calls}\n'
            f'for target in "$@"; do :; done\n{command}\n'
        )
        script.chmod(0o700)
        calls.write_text("")
        monkeypatch.setenv("CC", str(script))
        return calls

    return write


@pytest.fixture
def calls(compiler: Compiler, compiled: Path) -> Path:
    """Calls of a compiler that works."""
    return compiler(f"cp {compiled} $target")


@pytest.fixture
def unloaded() -> Iterator[None]:
    """Let the process forget the library, before and after."""
    library._loaded.cache_clear()
    yield
    library._loaded.cache_clear()


def loads() -> bool:
    """Whether the library is found, verified and usable."""
    return library._loaded.__wrapped__().has_lookup() in (0, 1)


def passing() -> bool:
    """Whether the library was compiled for this process alone; it is not loaded, as tests change cached files."""
    file, once = library_file()
    assert file.read_bytes()[:4] == b"\x7fELF"
    if once:
        file.unlink()
    return once


def count(calls: Path) -> int:
    return len(calls.read_text().splitlines())


def _loading() -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOADING]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_compile_at_once(cache: Path) -> None:
    for each in [_loading() for _ in range(2)]:
        output, errors = each.communicate()
        assert (each.returncode, errors) == (0, "")
        assert float(output) < FIRST
    assert [file.suffix for file in cache.iterdir()] == [".so"]


@pytest.mark.slow
def test_importing_pruning_compiles_and_imports_nothing_of_it() -> None:
    code = (
        "import sys, pruning, pruning.catalogue.kernels\n"
        "new = {'ctypes', 'subprocess', 'torch'} & set(sys.modules)\n"
        "assert not new, new\n"
        "pruning.prune, pruning.shrink\n"
        "assert not [name for name in sys.modules if name.startswith('pruning.kernels')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_cached_library_is_not_compiled_again(calls: Path, cache: Path) -> None:
    assert not passing()
    assert not passing()
    assert count(calls) == 1
    (file,) = cache.iterdir()
    assert (file.stat().st_mode & 0o777, cache.stat().st_mode & 0o777) == (0o600, 0o700)
    assert cache.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", ["flags", "sources", "processor", "version"])
def test_whatever_decides_the_code_decides_the_file(
    change: str, calls: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loads()
    if change == "flags":
        monkeypatch.setenv(compiling.MORE_FLAGS, "-O1")
    elif change == "sources":
        (tmp_path / "other.c").write_text("int other;")
        monkeypatch.setattr(compiling, "SOURCES", tmp_path)
    elif change == "processor":
        monkeypatch.setattr(compiling, "_processor", lambda: b"another")
    else:
        script = Path(os.environ["CC"])
        script.write_text(script.read_text().replace("echo 1.0", "echo 2.0"))
    assert loads()
    assert count(calls) == 2
    assert len({file.name[:32] for file in cache.iterdir()}) == 2


def _altered(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _linked(file: Path) -> None:
    aside = file.with_suffix(".aside")
    file.rename(aside)
    file.symlink_to(aside)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "altered": _altered,
    "truncated": lambda file: os.truncate(file, 1000),
    "empty": lambda file: os.truncate(file, 0),
    "writable by the group": lambda file: file.chmod(0o620),
    "writable by all": lambda file: file.chmod(0o602),
    "linked": _linked,
    "gone": lambda file: file.unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_somebody_may_have_changed_is_compiled_again(damage: str, calls: Path, cache: Path) -> None:
    assert not passing()
    (file,) = cache.glob("*.so")
    DAMAGES[damage](file)
    assert not passing()
    assert count(calls) == 2
    descriptor = compiling.checked(file)
    assert descriptor is not None
    os.close(descriptor)
    assert not passing()
    assert count(calls) == 2


def test_a_file_of_another_name_is_never_loaded(calls: Path, cache: Path) -> None:
    assert not passing()
    (file,) = cache.iterdir()
    planted = file.with_name(f"{file.name[:32]}-{'0' * 32}.so")
    planted.write_bytes(b"evil")
    assert library_file() == (file, False)
    (cache / file.name).unlink()
    (cache / file.name).mkdir()
    assert passing()


def test_garbage_of_the_right_name_is_compiled_again(calls: Path, cache: Path) -> None:
    assert not passing()
    (file,) = cache.iterdir()
    content = b"garbage"
    garbage = file.with_name(f"{file.name[:32]}-{hashlib.sha256(content).hexdigest()[:32]}.so")
    file.unlink()
    garbage.touch(mode=0o600)
    garbage.write_bytes(content)
    assert library_file() == (garbage, False)

    assert loads()
    assert list(cache.iterdir()) == [file]
    assert count(calls) == 2


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_the_file_that_was_checked_is_the_one_that_is_loaded(
    calls: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not passing()
    check = compiling.checked

    def then_exchange(file: Path) -> int | None:
        descriptor = check(file)
        file.with_suffix(".new").write_bytes(b"another")
        file.with_suffix(".new").rename(file)
        return descriptor

    monkeypatch.setattr(library, "checked", then_exchange)
    assert loads()
    (file,) = cache.iterdir()
    assert file.read_bytes() == b"another"


def test_a_base_folder_of_another_user_is_not_used(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner could exchange the cache between the check of its folders and the search in it."""
    cache.parent.parent.mkdir()
    true = Path.stat

    def of_another(path: Path, **named: bool) -> os.stat_result:
        values = list(true(path, **named))
        values[4] += path == cache.parent.parent  # st_uid
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", of_another)
    assert compiling._cache() is None
    assert not cache.parent.exists()


def _of_another_user(cache: Path, patch: pytest.MonkeyPatch) -> None:
    cache.mkdir(parents=True)
    patch.setattr(os, "getuid", lambda: cache.stat().st_uid + 1)


def _linked_folder(cache: Path, patch: pytest.MonkeyPatch) -> None:
    other = cache.parent.parent / "other"
    other.mkdir(parents=True, mode=0o700)
    cache.parent.mkdir(mode=0o700)
    cache.symlink_to(other)


def _linked_parent(cache: Path, patch: pytest.MonkeyPatch) -> None:
    other = cache.parent.parent / "other"
    (other / "kernels").mkdir(parents=True, mode=0o700)
    cache.parent.symlink_to(other)


def _open_to(mode: int, *, parent: bool = False) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def make(cache: Path, patch: pytest.MonkeyPatch) -> None:
        cache.mkdir(parents=True, mode=0o700)
        cache.parent.chmod(0o700)
        (cache.parent if parent else cache).chmod(mode)

    return make


def _in_a_file(cache: Path, patch: pytest.MonkeyPatch) -> None:
    cache.parent.parent.write_text("")


def _unwritable(cache: Path, patch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkstemp

    def refusing(suffix: str = "", dir: Path | None = None) -> tuple[int, str]:
        if dir == cache:
            raise PermissionError(13, "Permission denied")
        return make(suffix=suffix)

    patch.setattr(tempfile, "mkstemp", refusing)


def _in_proc(cache: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XDG_CACHE_HOME", "/proc/no/cache")


def _homeless(cache: Path, patch: pytest.MonkeyPatch) -> None:
    def unknown(user: int) -> None:
        raise KeyError(user)

    patch.delenv("XDG_CACHE_HOME")
    patch.delenv("HOME", raising=False)
    patch.setattr(pwd, "getpwuid", unknown)


def _relative_home(cache: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("XDG_CACHE_HOME", "relative")
    patch.setenv("HOME", "home")


UNUSABLE: dict[str, Callable[[Path, pytest.MonkeyPatch], None]] = {
    "of another user": _of_another_user,
    "a link": _linked_folder,
    "below a link": _linked_parent,
    "writable by the group": _open_to(0o720),
    "writable by all": _open_to(0o777),
    "below a folder writable by all": _open_to(0o777, parent=True),
    "below a file": _in_a_file,
    "read-only": _unwritable,
    "in /proc": _in_proc,
    "of a user without a home": _homeless,
    "in a relative home": _relative_home,
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_without_a_private_cache_each_process_compiles_for_itself(
    case: str, calls: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    UNUSABLE[case](cache, monkeypatch)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "here"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert passing()
    assert loads()
    assert count(calls) == 2
    assert list((tmp_path / "here").iterdir()) == []
    assert not [file for file in (tmp_path / "cache").rglob("*") if file.is_file()]


def test_a_relative_or_empty_cache_home_is_ignored(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for value in ("relative", ""):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert not passing()
    assert count(calls) == 1
    assert list((tmp_path / "home" / ".cache" / "pruning-orchestrator" / "kernels").glob("*.so"))


MISSING = {
    "no compiler": ({"PATH": "", "CC": ""}, r"no C compiler \(cc, gcc or clang\) is installed; install one"),
    "CC not installed": ({"CC": "no-such-cc -m64"}, r"environment variable CC \(='no-such-cc'\) is not installed"),
    "CC with a quote": ({"CC": "gcc '"}, r"environment variable CC \(=\"gcc '\"\) has an open quote"),
    "flags with a quote": ({"PRUNING_KERNEL_FLAGS": '"'}, "PRUNING_KERNEL_FLAGS .* has an open quote"),
    "CC that fails": ({"CC": "false"}, r"false cannot compile the kernels \(exit status 1, no file\)"),
    "CC that does nothing": ({"CC": "true"}, r"true cannot compile the kernels \(exit status 0, no file\)"),
    "unknown flag": ({"PRUNING_KERNEL_FLAGS": "--no-such-flag"}, "cannot compile the kernels .*no-such-flag"),
}


@pytest.mark.parametrize("case", MISSING)
def test_a_missing_compiler_is_one_sentence_and_all_layers_are_dense(
    case: str, cache: Path, monkeypatch: pytest.MonkeyPatch, unloaded: None
) -> None:
    environment, message = MISSING[case]
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(KernelsUnavailable, match=message) as caught:
        library_file()
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)
    if case != "no compiler":
        return
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
    with torch.no_grad():
        model[0].weight[:, ::2] = 0
    with pytest.warns(UserWarning, match=f"to_sparse: all layers are dense: {message}"):
        sparse = pruning.to_sparse(model, x)
    assert {choice.kernel for layer in sparse.sparse.layers for choice in layer.choices} == {"dense"}  # type: ignore[union-attr]
    assert torch.allclose(sparse(x), model(x))


FAILING = {
    "writes no library": ("echo hello > $target", "the compiled kernels cannot be loaded"),
    "says it in Latin-1": (r"printf 'error: \351\n' >&2; exit 1", "cannot compile the kernels .error: \ufffd"),
    "crashes": ("kill -9 $$", "cannot compile the kernels .exit status -9, no file"),
}


@pytest.mark.parametrize("case", FAILING)
def test_a_compiler_that_fails_is_one_sentence(case: str, compiler: Compiler) -> None:
    command, message = FAILING[case]
    compiler(command)
    with pytest.raises(KernelsUnavailable, match=message):
        loads()


def test_a_compiler_that_hangs_is_stopped_with_its_children(
    compiler: Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(f"sleep 100 & echo $! > {tmp_path / 'child'}; wait")
    monkeypatch.setattr(compiling, "LONGEST", 0.5)
    start = time.monotonic()
    with pytest.raises(KernelsUnavailable, match=r"was stopped, as it did not end within 0\.5 seconds\.$"):
        library_file()
    assert time.monotonic() - start < 20
    child = Path(f"/proc/{(tmp_path / 'child').read_text().strip()}/stat")
    end = time.monotonic() + 10
    while child.exists() and child.read_text().split()[2] != "Z" and time.monotonic() < end:
        time.sleep(0.05)
    assert not child.exists() or child.read_text().split()[2] == "Z"


def test_a_compiler_without_openmp_makes_kernels_of_one_thread(compiler: Compiler, compiled: Path) -> None:
    refused = 'case "$*" in *fopenmp*) echo "error: unsupported option -fopenmp" >&2; exit 1;; esac'
    calls = compiler(f"{refused}\ncp {compiled} $target")
    assert loads()
    assert count(calls) == 2


def test_no_temporary_folder_is_one_sentence(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object, **__: object) -> None:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "mkdtemp", refusing)
    with pytest.raises(KernelsUnavailable, match=r"cannot be written to a temporary file .*No usable temporary"):
        library_file()


def test_threads_that_begin_at_once_compile_once(
    calls: Path, compiler: Compiler, compiled: Path, unloaded: None
) -> None:
    compiler(f"sleep 0.3; cp {compiled} $target")
    found, start = list[int](), threading.Barrier(8)

    def call() -> None:
        start.wait()
        found.append(library.library().has_lookup())

    threads = [threading.Thread(target=call) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert count(calls) == 1
