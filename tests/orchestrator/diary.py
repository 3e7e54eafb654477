"""A writer of views that only notes what it is told; alone here, since each of its processes imports this module."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.views.tracking.view_writer import Requests


class Diary:
    """A writer that writes down what it is told, and how it is treated."""

    def __init__(
        self, path: Path, requests: Requests, say: Callable[[str], None], wrote: Callable[[int], None], slow: float = 0
    ) -> None:
        self._path, self._requests, self._say, self._slow = path, requests, say, slow

    def write(self) -> None:
        self._note(f"pid {os.getpid()}")
        print("a library prints this")
        while True:
            match self._requests.get():
                case ("start", sweep, plan, records):
                    time.sleep(self._slow)
                    self._note(f"start {sweep.name} {len(plan.trials)} {len(records)}")
                case ("record", event):
                    self._note(f"record {event.key}")
                case ("finish", status, report):
                    self._note(f"finish {status} {sorted(report)}")
                    self._say("almost done")
                    return

    def _note(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


def diary(path: Path, **options: Any) -> Callable[..., Diary]:
    """Return what makes a diary at `path / "diary"`."""
    return partial(Diary, path / "diary", **options)
