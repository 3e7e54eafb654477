"""Contexts for work in a worker process: its output goes to a file, and a cancellation sets a flag."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from orchestrator.store.local_backend import node_folder


@contextmanager
def captured_output(log: str) -> Iterator[str]:
    """Redirect file descriptors 1 and 2 to the file `log`, the output of C libraries included; yield its path.

    If the folder of `log` cannot be made on this machine, the file lies in the node folder, and if there is none the
    output is lost. A file that this call made is removed at the end if it is empty; any other file stays.
    """
    path, made = writable(Path(log))
    _flush()
    saved = os.dup(1), os.dup(2)
    try:
        with path.open("ab", buffering=0) as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        yield str(path)
    finally:
        _flush()
        for target, descriptor in enumerate(saved, start=1):
            os.dup2(descriptor, target)
            os.close(descriptor)
        with suppress(OSError):  # the log's folder may be gone, or full
            if made and not path.stat().st_size:
                path.unlink()


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Let SIGINT, which Ray's soft cancel sends, set a flag instead of raising KeyboardInterrupt; yield its reader.

    Our own handler also works if SIGINT was ignored when Ray was started, as in a background job of a shell.
    """
    flag = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield flag.is_set
        return
    before = signal.signal(signal.SIGINT, lambda *_: flag.set())
    try:
        yield flag.is_set
    finally:
        signal.signal(signal.SIGINT, before)


def writable(path: Path) -> tuple[Path, bool]:
    """Create a log file unless it exists; return its path, and whether this call made it.

    The path is `path`, that of a file in the node folder, or /dev/null if neither can be written.
    """
    own = node_folder()
    for folder in (path.parent, *([own / "logs"] if own else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return folder / path.name, _make(folder / path.name)
        except OSError:
            continue
    return Path(os.devnull), False


def _make(file: Path) -> bool:
    """Return whether the file had to be made; raise OSError if it cannot be written."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except FileExistsError:
        os.close(os.open(file, os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK))  # a pipe without a reader is no log
        return False
    return True


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
