"""A folder for a Ray of our own that no other user can enter, and a process that clears it however this one ends.

Ray opens its folders to every user of a machine and leaves them there, and where a driver is killed two of Ray's agents
look for their cluster for a minute. Run as a program, this file is the process that sees to both: it needs the standard
library only.
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
"""Bytes that the path of a socket may have."""
_SOCKET = "12345678/r/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
PATIENCE = 10.0
"""Seconds within which processes that still write to the folder have ended."""


@contextmanager
def private_folder() -> Iterator[str]:
    """Give the path of a new folder, in RAY_TMPDIR or the temporary directory, or in /tmp where those are too long.

    Once it is left, or this process is gone, what of Ray still has a file there open for writing is killed, and the
    folder is removed.
    """
    from orchestrator.execution.interrupts import SPARED  # not for the program

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
        yield os.path.join(folder, "r")  # which Ray opens to all, within one that stays closed


def main(folder: str) -> None:
    """Wait for the end of the driver, which is that of standard input, then clear `folder`."""
    driver = os.getppid()  # may have its own log open there still
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
    """Whether a process has opened a file below a folder for writing, as an entry of its /proc/PID/fd tells."""
    return os.readlink(opened).startswith(below) and bool(opened.lstat().st_mode & stat.S_IWUSR)


if __name__ == "__main__":
    main(sys.argv[1])
