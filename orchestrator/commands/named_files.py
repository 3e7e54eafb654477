"""Read and write files that a command line names, with errors that name the argument and the file."""

from __future__ import annotations

import errno
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.core.errors import OrchestratorError

KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (lambda mode: stat.S_ISCHR(mode) or stat.S_ISBLK(mode), "a device"),
)


def read_named(argument: str, path: Path) -> bytes | None:
    """Return the content of the file that `argument` names; None if there is no such file.

    Raises:
        OrchestratorError: it is not a regular file (reading a FIFO might wait for ever), or it cannot be read
    """
    with _explained(argument, path, "read"):
        try:
            _refuse_others(path)
            return path.read_bytes()
        except FileNotFoundError:
            return None


def replace_named(argument: str, path: Path, content: bytes) -> None:
    """Replace the file that `argument` names atomically: on an error the old content stays. Links are followed.

    Raises:
        OrchestratorError: it is not a regular file, or it cannot be written
    """
    with _explained(argument, path, "written"):
        full = Path(os.path.realpath(path))
        with suppress(FileNotFoundError):
            _refuse_others(full)
        aside = full.with_name(f".{uuid.uuid4().hex}.tmp")
        try:
            with open(aside, "xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                aside.chmod(stat.S_IMODE(full.stat().st_mode))
            aside.replace(full)
        finally:
            with suppress(OSError):
                aside.unlink(missing_ok=True)


def check_output_folder(argument: str, path: Path) -> None:
    """Raise OrchestratorError if no file can be written below the folder that `argument` names.

    The folder may be missing; the nearest existing folder above it is checked then.
    """
    with _explained(argument, path, "written", "folder"):
        folder = path.absolute()
        while not os.path.lexists(folder):
            folder = folder.parent
        if not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, f"{folder} is not a directory")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, f"permission denied in {folder}")


@contextmanager
def _explained(argument: str, path: Path, done: str, kind: str = "file") -> Iterator[None]:
    """Turn an OSError into an OrchestratorError that names the argument and the path."""
    try:
        yield
    except OSError as error:
        raise OrchestratorError(
            f"`{argument}` (={path}) cannot be {done}: {error.strerror or error}; name another {kind}."
        ) from None


def _refuse_others(path: Path) -> None:
    """Raise OSError if a path is not a regular file."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise OSError(f"it is {next((kind for holds, kind in KINDS if holds(mode)), 'not a regular file')}")
