"""Run a tracker in a process of its own, so that it costs the driver neither time nor memory.

Writing a trial to MLflow takes tens of milliseconds of Python; in the driver that would compete with handing out work.
Driver and process speak over the process's standard input and output, pickled: each trusts the other, they are one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import BinaryIO, Literal, Protocol, Self

from orchestrator.core.events import StageEvent, SweepInfo, Tracker
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan

NICENESS = 5
"""Of the process: the view may lag behind a little, the trials may not."""
_LOGGER = logging.getLogger("orchestrator")
Warn = Callable[[str], None]


class CompletableTracker(Tracker, Protocol):
    """A tracker that knows whether its view came to hold everything."""

    @property
    def complete(self) -> bool:
        """Whether all that was recorded is in the view; known once `finish` has returned."""
        ...


class TrackerProcess:
    """The tracker that `make(warn=...)` returns, living in a process that is started at once.

    `make` is pickled: a class or a function that can be imported, perhaps a `functools.partial` of it. Only `finish`
    waits for the process. As a context manager it ends the process where the sweep ends without `finish`; where an
    error ends it, such as an output that nobody reads any more, the view is closed as killed.
    """

    def __init__(self, make: Callable[..., CompletableTracker], warn: Warn = _LOGGER.warning) -> None:
        self.complete = False
        """Whether the view holds all that was recorded; known once `finish` has returned."""
        self._warn = warn
        self._sweep = ""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.views.tracking.process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        self._requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._ask(make)
        self._answered = threading.Thread(target=self._receive, name="tracker-answers", daemon=True)
        self._answered.start()
        threading.Thread(target=self._send, name="tracker-requests", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and self._sweep and self._process.poll() is None:
            self._warn = lambda _: None  # the error says more, and there may be nobody to read it
            self.finish("killed", {})
        self._end()

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        """Open the view, with what is finished already."""
        self._sweep = sweep.name
        self._ask(("start", sweep, plan, dict(finished)))

    def record(self, event: StageEvent) -> None:
        """Take one event."""
        self._ask(("record", event))

    def finish(self, status: Literal["finished", "failed", "killed"], report: Mapping[str, bytes]) -> None:
        """Close the view and end the process; wait until it has written what can be written."""
        self._ask(("finish", status, dict(report)))
        try:
            while self._answered.is_alive():
                self._answered.join(0.1)
        finally:
            self._end()
        if not self.complete and self._sweep and self._process.returncode != 0:
            self._warn(
                "The process that writes to MLflow has died; the store holds everything. "
                f"Complete the view with `python -m orchestrator.sync {self._sweep}`."
            )

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _ask(self, request: object) -> None:
        """Pickle here, not in the sending thread: what is asked may change when this returns."""
        self._requests.put(pickle.dumps(request, protocol=pickle.HIGHEST_PROTOCOL))

    def _send(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError), self._process.stdin as pipe:
            while True:
                pipe.write(self._requests.get())
                pipe.flush()

    def _receive(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(EOFError, pickle.UnpicklingError):
            while True:
                kind, value = pickle.load(self._process.stdout)
                if kind == "warning":
                    self._warn(value)
                else:
                    self.complete = value


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Do what `requests` ask for until the view is closed; return early when the driver is gone."""
    answering = threading.Lock()

    def reply(kind: str, value: str | bool) -> None:
        with answering:
            pickle.dump((kind, value), replies)
            replies.flush()

    make: Callable[..., CompletableTracker] = pickle.load(requests)
    tracker = make(warn=lambda text: reply("warning", text))
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        match request:
            case ("start", sweep, plan, finished):
                tracker.start(sweep, plan, finished)
            case ("record", event):
                tracker.record(event)
            case ("finish", status, report):
                tracker.finish(status, report)
                reply("complete", tracker.complete)
                return


def main() -> None:
    """Serve the driver that started this process; leave at once when done, whatever other threads still do."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # Ctrl-C and `ray job stop` also reach this process,
        signal.signal(number, signal.SIG_IGN)  # but are the driver's: it then asks for the view to be closed
    os.nice(NICENESS)
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what a library prints is no answer
    serve(sys.stdin.buffer, replies)
    os._exit(0)


if __name__ == "__main__":
    main()
