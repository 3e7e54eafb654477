"""Contexts for work in a worker process: its output goes to a file, and a cancellation sets a flag."""

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
    """Redirect file descriptors 1 and 2 to the file `log`, the output of C libraries included; yield its path.

    If the folder of `log` cannot be made on this machine, the file lies in the node folder, and if there is none the
    output is lost. An empty file is removed at the end.
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


def writable(path: Path) -> Path:
    """Create a log file and return its path: `path`, a file in the node folder, or /dev/null if neither works."""
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
