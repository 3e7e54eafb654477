"""What surrounds the work in a worker process: its output goes to a file, a cancellation becomes a flag."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from orchestrator.store.node_folder import node_folder


@contextmanager
def captured_output(log: str) -> Iterator[str]:
    """Send file descriptors 1 and 2 to the file `log`, C libraries' output included; give its path.

    Where its folder cannot be made on this machine, the file lies in this user's folder of the temporary directory, if
    that can be trusted. An empty one is removed.
    """
    path = writable(Path(log))
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
        if path.exists() and not path.stat().st_size:
            path.unlink()


@contextmanager
def interrupt_flag() -> Iterator[Callable[[], bool]]:
    """Let SIGINT, and so Ray's soft cancel, raise a flag instead of KeyboardInterrupt; give what reads it.

    A handler of our own also works where SIGINT was ignored when Ray was started, as in a shell's background job.
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


def writable(path: Path) -> Path:
    """Return `path`, a file that is there from now on, or one of its name where this node can write, or /dev/null."""
    own = node_folder()
    for folder in (path.parent, *([own / "logs"] if own else [])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / path.name).touch()
        except OSError:
            continue
        return folder / path.name
    return Path(os.devnull)


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
