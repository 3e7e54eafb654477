"""The driver's side of the process that writes a sweep's view, which so costs the driver neither time nor memory.

They speak over the process's standard input and output, pickled: each trusts the other, they are one.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Literal, Self

from orchestrator.core.events import StageEvent, SweepInfo, Tracker
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

RESTARTS = 3
SILENCE, KILLED_LIMIT = 60.0, 5.0
"""Seconds without a word after which a view that is finished is given up; seconds that an interrupted sweep waits."""


class TrackerProcess(Tracker):
    """Keeps a view by what `make` returns, a `ViewWriter`, in a process that is started at once.

    `make` is pickled. A process that dies is started again, up to `RESTARTS` times, and told everything again: what was
    written it finds. Only `finish` waits. As a context manager it ends the process where the sweep ends without
    `finish`; where an error ends it, such as an output that nobody reads any more, the view is closed as killed.
    """

    def __init__(self, make: Callable[..., Any], say: Callable[[str], None]) -> None:
        self.complete = self._ended = False
        self._say = say
        self._told: list[object] = [make]
        self._begin()
        self._attending = threading.Thread(target=self._attend, name="tracker", daemon=True)
        self._attending.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and len(self._told) > 1 and not self._ended:
            self._say = lambda _: None  # the error says more, and there may be nobody to read it
            self.finish("killed", {})
        self._end()

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view, with what is finished already."""
        self._told.append(("start", sweep, plan, dict(finished)))

    def record(self, event: StageEvent) -> None:
        """Take one event."""
        self._told.append(("record", event))

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view and end the process; wait until it has written what can be written."""
        begun = self._heard = time.monotonic()
        self._told.append(("finish", status, dict(report)))
        while self._attending.is_alive() and time.monotonic() < self._heard + SILENCE:
            if status == "killed" and time.monotonic() > begun + KILLED_LIMIT:
                break
            self._attending.join(0.05)
        self._end()

    def _begin(self) -> None:
        self._heard = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.views.tracking.view_writer"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        threading.Thread(target=self._tell, args=(self._process,), daemon=True).start()

    def _tell(self, process: subprocess.Popen[bytes]) -> None:
        """Tell the process all that was told, and what is told from now on, as long as it lives."""
        assert process.stdin is not None
        told = 0
        with suppress(OSError), process.stdin as pipe:
            while process.poll() is None:
                for request in self._told[told:]:
                    pickle.dump(request, pipe, protocol=pickle.HIGHEST_PROTOCOL)
                    told += 1
                pipe.flush()
                time.sleep(0.05)

    def _attend(self) -> None:
        """Hear what the process says; start it again where it dies."""
        for left in reversed(range(RESTARTS + 1)):
            assert self._process.stdout is not None
            with suppress(EOFError, pickle.UnpicklingError), self._process.stdout as pipe:
                while True:
                    answer = pickle.load(pipe)
                    self._heard = time.monotonic()
                    if isinstance(answer, str):
                        self._say(answer)
                    elif isinstance(answer, bool):
                        self.complete = answer
                        return
            if self._ended:
                return
            what = "it is started again" if left else "the store holds everything"
            self._say(f"The process that writes to MLflow has died; {what}.")
            if left:
                self._begin()

    def _end(self) -> None:
        self._ended = True
        while self._attending.is_alive():  # which may be about to start another
            self._process.kill()
            self._attending.join(0.05)
        self._process.kill()
        self._process.wait()
