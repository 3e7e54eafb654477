"""Live processes of this machine by their sessions and titles; a session is named by the process that leads it."""

from __future__ import annotations

import os
import signal
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def processes_in(sessions: Collection[int], *titles: str) -> list[int]:
    """Return the live processes of some sessions; only those whose title begins with one of `titles` if given."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            state, *_, session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue
        if state != "Z" and int(session) in sessions and (not titles or title.startswith(titles)):
            found.append(int(path.name))
    return found


def kill(sessions: Collection[int], *titles: str) -> list[int]:
    """Kill those processes, and what they start meanwhile; return the first ones."""
    killed = found = processes_in(sessions, *titles)
    while found:
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        found = [pid for pid in processes_in(sessions, *titles) if titles == () or pid in killed]
    return killed
