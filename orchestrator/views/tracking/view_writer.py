"""Writer of a sweep's view, for a running sweep and for `orchestrator.sync`, and the process that runs it.

The writer checks runs, and writes what they lack. After any error it makes a new connection and checks every run
again, so that everything that was lost, even the answer to a successful request, is found and completed.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from textwrap import shorten
from typing import Any

from orchestrator.config.tracking_uri import sqlite_path
from orchestrator.core.errors import CannotKeep, OrchestratorError
from orchestrator.core.records import CurvePoint
from orchestrator.core.redact import redact
from orchestrator.store.leases import Leases
from orchestrator.views.tracking import view_database
from orchestrator.views.tracking.run_contents import SweepView
from orchestrator.views.tracking.runs import CreatedElsewhere, Creating, MlflowRuns, ReadFile

OPENING, CLOSING = -2, -1  # the parent run's start and end, among the indices of trials
REFUSALS = 3  # refused attempts in a row after which the rest is left out
LOOK_EVERY = 10.0  # seconds between checks of the checkpoints of running stages
LOOK_AGAIN = 0.5  # seconds until the next search for runs that another driver is creating
SETTLING = 0.5  # seconds to wait for more events: writing many costs little more than writing one
LONGEST_PAUSE = 30.0  # maximum seconds between attempts while MLflow is away
DOUBLED = 10  # maximum number of doublings of the pause: 2.0**1024 overflows
PATIENCE = 20.0  # seconds without a successful write, after the sweep's end, after which the rest is left out
FULL_PATIENCE = 2.0  # the same for a full disk, which rarely changes soon
NICENESS = 5  # of the process: the view may lag behind a little, the trials may not
ELSEWHERE = "name another place with `tracking.uri` (`--uri`) or MLFLOW_TRACKING_URI"
_REFUSED = {"INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED", "UNAUTHENTICATED", "INVALID_STATE"}

Requests = queue.SimpleQueue[tuple[Any, ...]]
"""Calls of a `Tracker`: ("start", sweep, plan, finished), ("record", event) ..., ("decided", decision) ...,
("finish", status, report)."""


class ViewWriter:
    """Writer of the view that requests describe; it connects to MLflow before the first request.

    Args:
        requests: queue of requests
        say: prints messages to the user
        wrote: called with the number of remaining runs after each written run, and each page of runs that were read
        read: reads a stage's masks from the store
        uri: MLflow's address
        experiment: name of the experiment
        curve: returns the points of a running stage's checkpoint
        leases: makes leases of the store, so that drivers that share it create runs one at a time
    """

    def __init__(
        self,
        requests: Requests,
        say: Callable[[str], None],
        wrote: Callable[[int], None],
        *,
        read: ReadFile,
        uri: str,
        experiment: str,
        curve: Callable[[str], Sequence[CurvePoint]] = lambda _: (),
        leases: Callable[[], Leases] | None = None,
    ) -> None:
        self._curve, self._due = curve, 0.0
        self._requests, self._say, self._wrote = requests, say, wrote
        self._connect = partial(MlflowRuns, uri, experiment, read, say, self._claim, self._alive)
        self._creating, self._creating_for = Creating(None), partial(Creating, leases, uri, experiment)
        self._database, self._name = sqlite_path(uri), f"MLflow at {redact(uri)}"
        self._runs: MlflowRuns | None = None
        self._view: SweepView | None = None
        self._closed = False
        self._todo: dict[int, None] = {}
        """Indices of runs to check, in order."""
        self._troubles, self._reported, self._progress = 0, False, 0.0

    def write(self) -> None:
        """Write until the view is finished and complete.

        Raises:
            CannotKeep: MLflow cannot be used, refuses a run, or was away for too long at the end
        """
        try:
            while not self._closed or self._todo:
                self._write_next()
        finally:
            self._creating.give_back()

    def _write_next(self) -> None:
        index = OPENING
        try:
            self._runs = self._runs or self._connect()
            if not self._todo:
                self._runs.settle()
                self._creating.give_back()
                self._wait()
            self._gather(0)
            if self._view is not None and self._todo:
                index = next(iter(self._todo))
                self._look(self._runs, self._view, index)
        except CreatedElsewhere:
            time.sleep(LOOK_AGAIN)
        except Exception as error:
            self._note(error, index)
            self._gather(min(2.0 ** min(self._troubles - 2, DOUBLED), LONGEST_PAUSE))

    def _claim(self) -> bool:
        """Acquire the right to create runs; at the end of the sweep the wait for another driver is limited."""
        return self._creating.take() or (self._closed and time.monotonic() > self._progress + PATIENCE)

    def _alive(self) -> None:
        """Show the driver that a long search goes on."""
        self._wrote(len(self._todo))

    def _wait(self) -> None:
        """Wait for the next requests; every LOOK_EVERY seconds update the curves of running stages from checkpoints."""
        with suppress(queue.Empty):
            self._take(self._requests.get(timeout=LOOK_EVERY))
            self._gather(SETTLING)
        if self._view is not None and time.monotonic() >= self._due:
            for key in sorted(self._view.running):
                with suppress(OrchestratorError):  # the store is away
                    self._todo |= dict.fromkeys(self._view.reach(key, self._curve(key)))
            self._due = time.monotonic() + LOOK_EVERY

    def _look(self, runs: MlflowRuns, view: SweepView, index: int) -> None:
        look = {OPENING: runs.open, CLOSING: runs.close}.get(index, partial(runs.write, index=index))
        written = look(view)
        del self._todo[index]
        if written:
            self._wrote(len(self._todo))
            self._troubles, self._reported, self._progress = 0, False, time.monotonic()

    def _gather(self, seconds: float) -> None:
        """Take all requests that come within `seconds`; none come after `finish`."""
        due = time.monotonic() + seconds
        with suppress(queue.Empty):
            while not self._closed:
                self._take(self._requests.get(timeout=max(0.0, due - time.monotonic())))
        if self._closed and self._troubles:
            time.sleep(min(seconds, 1.0))

    def _take(self, request: tuple[Any, ...]) -> None:
        match request:
            case ("start", sweep, plan, finished):
                self._view = SweepView(sweep, plan, finished)
                self._creating = self._creating_for(sweep.name)
                self._look_at_all()
            case ("record", event) if self._view is not None:
                self._todo |= dict.fromkeys(self._view.take(event))
            case ("decided", decision) if self._view is not None:
                self._todo |= dict.fromkeys(self._view.decide(decision))
            case ("finish", status, report):
                self._closed, self._troubles, self._progress = True, 0, time.monotonic()
                if self._view is not None:
                    self._view.close(status, report)
                    self._look_at_all()

    def _look_at_all(self, last: int = OPENING) -> None:
        """Queue every run for a check; the run `last`, which was just refused, goes after the other trials."""
        if self._view is not None:
            trials = sorted(range(len(self._view.ids)), key=last.__eq__)
            self._todo = dict.fromkeys((OPENING, *trials, *([CLOSING] if self._closed else [])))

    def _note(self, error: Exception, index: int) -> None:
        """Handle an error: report it and check all runs again, or raise `CannotKeep` if trying again cannot help."""
        connecting, self._runs, self._troubles = self._runs is None, None, self._troubles + 1
        reason = shorten(redact(view_database.reason(error)), 240, placeholder=" ...").rstrip(". ")
        passing = isinstance(error, OrchestratorError) or view_database.may_pass(error)
        refused = isinstance(error, _refusals()) or getattr(error, "error_code", None) in _REFUSED
        if isinstance(error, CannotKeep):
            raise CannotKeep(f"{self._name} cannot be used: {error}.") from error
        if connecting and not passing and (refused or self._database):
            remedy = f"move {self._database} away, or {ELSEWHERE}" if self._database else ELSEWHERE
            raise CannotKeep(f"{self._name} cannot be used: {reason}; {remedy}.") from error
        if refused and not passing and self._closed and self._troubles >= REFUSALS:
            raise CannotKeep(f"{self._name} does not take a run of this sweep: {reason}.") from error
        if (passing or not refused) and not self._reported:
            self._reported = True
            self._say(
                f"{self._name} cannot be written now ({reason}); the store keeps all, and writing is tried again."
            )
        patience = FULL_PATIENCE if view_database.is_full(error) else PATIENCE
        if self._closed and time.monotonic() > self._progress + patience:
            raise CannotKeep(f"{self._name} is given up ({reason}).") from error
        self._look_at_all(index)


def _refusals() -> tuple[type[Exception], ...]:
    """Return error types that recur on every attempt: a missing package, a URI of no known kind of database."""
    sqlalchemy = sys.modules.get("sqlalchemy.exc")  # without its import it cannot have raised an error
    return (ImportError, *([sqlalchemy.ArgumentError] if sqlalchemy else []))


def main() -> None:
    """Write the MLflow view for the driver that started this process; exit at once when done or without the driver."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # Ctrl-C and `ray job stop` also reach this process,
        signal.signal(number, signal.SIG_IGN)  # but only the driver handles them: it then closes the view
    os.nice(NICENESS)
    replies, requests = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0), Requests()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # output of a library must not mix with answers

    def reply(answer: str | bool | int) -> None:
        replies.write(pickle.dumps(answer))

    def receive() -> None:
        try:
            while True:
                requests.put(pickle.load(sys.stdin.buffer))
        finally:
            os._exit(0)

    make: Callable[..., ViewWriter] = pickle.load(sys.stdin.buffer)
    threading.Thread(target=receive, daemon=True).start()
    try:
        make(requests, reply, reply).write()
        reply(True)
    except CannotKeep as error:
        reply(str(error))
        reply(False)
    os._exit(0)


if __name__ == "__main__":
    main()
