"""Driver's side of the process that writes a sweep's view, so that writing costs the driver neither time nor memory.

Driver and process exchange pickled messages over the process's standard input and output; they trust each other.
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

from orchestrator.core.events import Decision, StageEvent, SweepInfo, Tracker
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

MOST_RESTARTS = 3
PAUSE = 2.0
"""Seconds without an answer after which `finish` says that it waits for a server."""
SILENCE, KILLED_LIMIT = 60.0, 5.0
"""Seconds of silence after which `finish` gives up the view; seconds that an interrupted sweep waits for it."""


class TrackerProcess(Tracker):
    """Tracker that writes the view in a process of its own, which is started at once.

    A process that dies is started again, up to `MOST_RESTARTS` times, and gets all requests again; it finds what was
    written before. Only `finish` waits. As a context manager, the tracker ends the process if the sweep ends without
    `finish`; if an error ends the sweep, for example a closed output, the view is closed as killed.

    Args:
        make: function that returns the process's `ViewWriter`; it is pickled
        say: prints messages to the user
        server: name of the server that is written to, for the message that `finish` waits for it; None: a file
    """

    def __init__(self, make: Callable[..., Any], say: Callable[[str], None], server: str | None = None) -> None:
        self.complete = self._ended = False
        self._say, self._server = say, server
        self._requests: list[object] = [make]
        self._begin()
        self._attending = threading.Thread(target=self._attend, name="tracker", daemon=True)
        self._attending.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and len(self._requests) > 1 and not self._ended:
            self._say = lambda _: None  # the error says more, and the output may be closed
            self.finish("killed", {})
        self._end()

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view with the stages that are finished already."""
        self._requests.append(("start", sweep, plan, dict(finished)))

    def record(self, event: StageEvent) -> None:
        """Pass one event to the process."""
        self._requests.append(("record", event))

    def decided(self, decision: Decision) -> None:
        """Pass the last decision of a search to the process."""
        self._requests.append(("decided", decision))

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view, wait until the process has written what it can, and end it."""
        begun = self._heard = time.monotonic()
        self._requests.append(("finish", status, dict(report)))
        told = status == "killed" or self._server is None
        while self._attending.is_alive() and time.monotonic() < self._heard + SILENCE:
            if not told and time.monotonic() > max(begun, self._heard) + PAUSE:
                told = True
                self._say(f"Waiting for MLflow at {self._server}, which does not answer; the store holds everything.")
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
        """Send the process all requests so far and all later ones, while it lives."""
        assert process.stdin is not None
        sent = 0
        with suppress(OSError), process.stdin as pipe:
            while process.poll() is None:
                for request in self._requests[sent:]:
                    pickle.dump(request, pipe, protocol=pickle.HIGHEST_PROTOCOL)
                    sent += 1
                pipe.flush()
                time.sleep(0.05)

    def _attend(self) -> None:
        """Read the process's answers; start it again if it dies."""
        for left in reversed(range(MOST_RESTARTS + 1)):
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
            remedy = "it is started again" if left else "the store holds everything"
            self._say(f"The process that writes to MLflow has died; {remedy}.")
            if left:
                self._begin()

    def _end(self) -> None:
        self._ended = True
        while self._attending.is_alive():  # the thread may be about to start another process
            self._process.kill()
            self._attending.join(0.05)
        self._process.kill()
        self._process.wait()
