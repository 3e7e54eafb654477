"""A private folder for the sweep's own Ray, and a process that removes it however the driver ends.

Ray opens its folders to every user of a machine and does not remove them. If a driver is killed, two of Ray's agents
look for their cluster for another minute. Run as a program, this file is the process that ends these agents and removes
the folder; it uses the standard library only.
"""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "pruning-ray-"
LONGEST = 103 if sys.platform == "darwin" else 107
"""Longest path of a socket in bytes."""
_SOCKET = "12345678/r/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
PATIENCE = 10.0
"""Seconds for which the program kills processes that still write to the folder."""


@contextmanager
def private_folder() -> Iterator[str]:
    """Yield the path of a new folder in RAY_TMPDIR or the temporary directory, or in /tmp if those paths are too long.

    When the context is left, or this process ends, processes that still have a file there open for writing are killed,
    and the folder is removed.
    """
    from orchestrator.execution.interrupts import SPARED  # imported here, as the program cannot import this package

    base = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    if len(os.path.join(base, PREFIX + _SOCKET)) > LONGEST:
        base = "/tmp"
    folder = tempfile.mkdtemp(prefix=PREFIX, dir=base)
    devnull = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, "-IS", __file__, folder],
        stdin=subprocess.PIPE,
        stdout=devnull,
        stderr=devnull,
        start_new_session=True,
    ) as watcher:
        SPARED.add(watcher.pid)
        yield os.path.join(folder, "r")  # Ray opens this subfolder to all users, and the folder above stays closed


def main(folder: str) -> None:
    """Wait until the driver ends, which closes standard input, then remove `folder`."""
    driver = os.getppid()  # never killed, though it may still have a log open there
    sys.stdin.buffer.read()
    deadline = time.monotonic() + PATIENCE
    while os.path.exists(folder) and time.monotonic() < deadline:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if int(process.name) != driver and any(
                    _writes(opened, f"{folder}/") for opened in (process / "fd").iterdir()
                ):
                    os.kill(int(process.name), signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)


def _writes(opened: Path, below: str) -> bool:
    """Whether an entry of /proc/PID/fd is a file below a folder that the process has opened for writing."""
    return os.readlink(opened).startswith(below) and bool(opened.lstat().st_mode & stat.S_IWUSR)


if __name__ == "__main__":
    main(sys.argv[1])
