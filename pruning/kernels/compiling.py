"""Compile the C sources of the kernels once for this processor, and cache the library for this user.

The cache is `$XDG_CACHE_HOME/pruning-orchestrator/kernels` (by default in `~/.cache`). A file's name has a digest of
everything that the compilation depends on, and a digest of the file's own content. A file is loaded only if it belongs
to this user, if nobody else may write to it or to its folders, and if its content has the digest of its name; on Linux
the file that was checked is the one that is loaded, whatever its path leads to by then. A cache that cannot be used so,
or whose base folder belongs to another user, is left alone, and this process compiles for itself.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).parent / "sources"
FLAGS = ("-O3", "-fno-math-errno", "-fno-strict-aliasing", "-shared", "-fPIC")
THREADED = ("-fopenmp",)
MORE_FLAGS = "PRUNING_KERNEL_FLAGS"
"""Environment variable with further flags for the compiler, for example `-fsanitize=address`."""
FOLDERS = ("pruning-orchestrator", "kernels")
"""Folders below the user's cache directory."""
LONGEST = 120
"""Seconds after which the compiler is stopped."""


class KernelsUnavailable(RuntimeError):
    """The kernels cannot be compiled or loaded on this machine."""


def library_file(anew: bool = False) -> tuple[Path, bool]:
    """Return the compiled library, compiled now if the cache does not have it, and whether to delete it after loading.

    Args:
        anew: compile it even if the cache has it.

    Raises:
        KernelsUnavailable: there is no C compiler, or it fails.
    """
    command = installed_compiler()
    digest, folder = _digest(command), _cache()
    if folder is not None and not anew:
        for file in sorted(folder.glob(f"{digest}-*.so")):
            if (descriptor := checked(file)) is not None:
                os.close(descriptor)
                return file, False
    try:
        content = _compiled(command)
        if folder is not None and (kept := _kept(folder, digest, content)) is not None:
            return kept, False
        handle, name = tempfile.mkstemp(suffix=".so")
        with os.fdopen(handle, "wb") as opened:
            opened.write(content)
    except OSError as error:
        raise KernelsUnavailable(f"the compiled kernels cannot be written to a temporary file ({error}).") from error
    return Path(name), True


def checked(file: Path) -> int | None:
    """Return a descriptor of a cached library; None unless it is this user's own and has the content of its name."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and _is_private(found):
        with open(descriptor, "rb", closefd=False) as opened:
            if file.stem.partition("-")[2] == hashlib.file_digest(opened, "sha256").hexdigest()[:32]:
                return descriptor
    os.close(descriptor)
    return None


def installed_compiler() -> list[str]:
    """Return the command of the C compiler: that of the environment variable `CC`, or the first that is installed.

    Raises:
        KernelsUnavailable: there is none.
    """
    named = _words("CC")
    for command in (named,) if named else (["cc"], ["gcc"], ["clang"]):
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    if named:
        raise KernelsUnavailable(f"the C compiler of the environment variable CC (={named[0]!r}) is not installed.")
    raise KernelsUnavailable("no C compiler (cc, gcc or clang) is installed; install one, for example gcc.")


def _words(variable: str) -> list[str]:
    """Return the words of an environment variable."""
    value = os.environ.get(variable, "")
    try:
        return shlex.split(value)
    except ValueError as error:
        raise KernelsUnavailable(f"the environment variable {variable} (={value!r}) has an open quote.") from error


def _digest(compiler: Sequence[str]) -> str:
    """Return a digest of all that decides the compiled code."""
    parts = [
        file.name.encode() + file.read_bytes() for file in sorted(SOURCES.iterdir()) if file.suffix in (".c", ".h")
    ]
    parts += [repr((compiler, _flags())).encode(), _run(compiler, "--version")[1].encode(), _processor()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:32]


def _flags() -> list[str]:
    native = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    return [*FLAGS, native, *_words(MORE_FLAGS)]


def _run(compiler: Sequence[str], *arguments: str) -> tuple[int, str, str]:
    """Run the compiler; return its exit status, output and errors.

    Raises:
        KernelsUnavailable: it does not start, or it does not end; its own children are stopped with it.
    """
    try:
        started = subprocess.Popen(
            [*compiler, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        raise KernelsUnavailable(f"the C compiler {compiler[0]} does not run ({error}).") from error
    with started:
        try:
            output, errors = started.communicate(timeout=LONGEST)
        except BaseException as error:
            os.killpg(started.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise KernelsUnavailable(
                f"the C compiler {compiler[0]} was stopped, as it did not end within {LONGEST} seconds."
            ) from error
    return started.returncode, output, errors


def _processor() -> bytes:
    """Return the instruction sets of this processor: a home directory may be shared by several machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}".encode()
    named = {line.partition(":")[0].strip(): line for line in reversed(lines)}
    return "\n".join(named.get(key, "") for key in ("model name", "flags", "Features", "CPU part")).encode()


def _compiled(compiler: Sequence[str]) -> bytes:
    """Return the content of the library; without threads if the compiler has no OpenMP."""
    said = ""
    with tempfile.TemporaryDirectory() as place:
        target, whole = Path(place) / "kernels.so", Path(place) / "kernels.c"
        whole.write_text("".join(f'#include "{file}"\n' for file in sorted(SOURCES.glob("*.c"))))  # headers read once
        for threads in (THREADED, ()):
            status, output, errors = _run(compiler, *_flags(), *threads, str(whole), "-o", str(target))
            if not status and target.is_file():
                return target.read_bytes()
            text = errors or output or f"exit status {status}, no file"
            said = said or next((line for line in text.splitlines() if "error" in line), text)
    raise KernelsUnavailable(f"the C compiler {compiler[0]} cannot compile the kernels ({said.strip()[:300]}).")


def _cache() -> Path | None:
    """Return this user's cache folder, made if it is missing; None if it cannot be private."""
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = Path(os.path.expanduser("~"), ".cache")
    if not base.is_absolute():  # this user has no home directory
        return None
    folder = base
    try:
        base.mkdir(parents=True, exist_ok=True)
        if base.stat().st_uid not in (os.getuid(), 0):  # its owner can exchange what lies in it
            return None
        for name in FOLDERS:
            folder = folder / name
            folder.mkdir(exist_ok=True, mode=0o700)
            found = folder.lstat()
            if not stat.S_ISDIR(found.st_mode) or not _is_private(found):
                return None
    except OSError:
        return None
    return folder


def _is_private(found: os.stat_result) -> bool:
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _kept(folder: Path, digest: str, content: bytes) -> Path | None:
    """Write a library into the cache, whole or not at all; return None if the cache cannot be written."""
    file = folder / f"{digest}-{hashlib.sha256(content).hexdigest()[:32]}.so"
    try:
        handle, name = tempfile.mkstemp(dir=folder, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as part:
                part.write(content)
            os.replace(name, file)
        except OSError:
            os.unlink(name)
            raise
    except OSError:
        return None
    return file
