"""One thread that writes a sweep's view, run by run, and neither stops nor slows the sweep when the view is away."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from orchestrator.core.errors import CannotKeep
from orchestrator.core.events import StageEvent
from orchestrator.core.redact import redact
from orchestrator.views.tracking.run_contents import SweepView

OPENING, CLOSING = -2, -1
"""Stand for the parent run among the indices of trials: when it is opened, when it is closed."""

REFUSALS = 3
"""Attempts in a row at a run that the view's keeper refuses, after which the run is left out."""

SETTLING = 1.0
"""Seconds in which further events for a run are awaited: to write many costs little more than to write one."""

LONGEST_PAUSE = 30.0
"""Seconds between two attempts while the keeper is away."""


class ViewKeeper(Protocol):
    """A connection to what keeps the view, such as MLflow. Made anew after every trouble."""

    def write(self, view: SweepView, index: int) -> bool:
        """Bring one run up to date; return whether anything had to be written."""
        ...


class ViewWriter:
    """Writes what has changed; everything that has gathered for a run goes out at once.

    After any trouble the connection is made anew and every run is looked at again, so whatever was lost on the way,
    even the answer to a request that succeeded, is found and completed. A run that is refused, rather than unreachable,
    is left out after `REFUSALS` attempts, and a keeper that can never work is not waited for.
    """

    def __init__(
        self,
        connect: Callable[[], ViewKeeper],
        refused: Callable[[Exception], bool],
        warn: Callable[[str], None],
        name: str,
    ) -> None:
        self.complete = False
        """Whether all that was recorded has been written."""
        self.reached = False
        """Whether the keeper could be connected to at least once."""
        self._connect = connect
        self._refused = refused
        self._warn = warn
        self._name = name
        self._view: SweepView | None = None
        self._changed = threading.Condition()
        self._to_write: dict[int, None] = {}
        """Runs to be looked at when nothing else is to be done, and the parent."""
        self._settling: dict[int, float] = {}
        """Runs that events have changed -> when the first of these came, in order."""
        self._refusals: Counter[int] = Counter()
        self._closing = False
        self._abandoned = threading.Event()
        self._progress = time.monotonic()
        self._thread = threading.Thread(target=self._work, name="view-writer", daemon=True)
        self._thread.start()

    def open(self, view: SweepView) -> None:
        """Write `view` from now on."""
        with self._changed:
            self._view = view
            self._all_changed(view)
            self._changed.notify()

    def take(self, event: StageEvent) -> None:
        """Take one event and return at once."""
        with self._changed:
            if self._view is not None and not self._closing:
                for index in self._view.take(event):
                    self._to_write.pop(index, None)
                    self._settling.setdefault(index, time.monotonic())
                self._changed.notify()

    def close(self, patience: float, limit: float = math.inf) -> bool:
        """Wait until all is written; return whether it is.

        Give up when nothing has been written for `patience` seconds, and `limit` seconds from now in any case.
        """
        with self._changed:
            self._closing = True
            if self._view is not None:
                self._all_changed(self._view)
            self._changed.notify()
        begun = self._progress = time.monotonic()
        while self._thread.is_alive() and time.monotonic() < min(self._progress + patience, begun + limit):
            self._thread.join(0.05)
        self._abandoned.set()
        return self.complete

    def _work(self) -> None:
        keeper: ViewKeeper | None = None
        troubles = 0
        while not self._abandoned.is_set():
            index = OPENING
            try:
                if keeper is None:
                    keeper = self._connect()
                    self.reached = True
                following = self._next()
                if following is None:
                    self.complete = not self._refusals
                    return
                index, view = following
                if keeper.write(view, index):
                    self._progress = time.monotonic()
                    troubles = 0
                self._refusals.pop(index, None)  # a run that another driver withdrew is refused once
            except CannotKeep as error:
                self._warn(f"{self._name} cannot be used: {redact(str(error))}.")
                return
            except Exception as error:
                keeper = None
                troubles += 1
                if not self._may_go_on(error, index, troubles):
                    return
                self._abandoned.wait(min(2.0 ** (troubles - 2), LONGEST_PAUSE, *([1.0] if self._closing else [])))

    def _next(self) -> tuple[int, SweepView] | None:
        """Wait for a run to write; return None when the view is closed and nothing is left."""
        with self._changed:
            while True:
                index, pause = self._choose()
                if index is not None and self._view is not None:
                    self._to_write.pop(index, None)
                    self._settling.pop(index, None)
                    return index, self._view
                if self._closing:
                    return None
                self._changed.wait(pause)

    def _choose(self) -> tuple[int | None, float | None]:
        """Return the run to write next: the parent first, then what has settled, then the rest; else how long to wait.

        A run that events change before its turn has come is created with what they brought, in one go.
        """
        if OPENING in self._to_write:
            return OPENING, None
        first = next(iter(self._settling), None)
        pause = None if first is None else self._settling[first] + SETTLING - time.monotonic()
        if pause is not None and pause <= 0:
            return first, None
        return next(iter(self._to_write), None), pause

    def _may_go_on(self, error: Exception, index: int, troubles: int) -> bool:
        """Note a trouble, and say whether trying again can help."""
        refused = self._refused(error)
        if troubles == 1 and not refused:
            self._warn(f"{self._name} is away ({_sentence(error)}); the sweep goes on, and it is tried again.")
        with self._changed:
            if refused:
                self._refusals[index] += 1
            if self._refusals[index] == REFUSALS:
                self._warn(f"{self._name} does not take a run of this sweep: {_sentence(error)}")
                if index == OPENING:
                    return False
            if self._view is not None:
                self._all_changed(self._view)
        return True

    def _all_changed(self, view: SweepView) -> None:
        """Look at every run again, the parent's close last."""
        everything = (OPENING, *range(len(view.plan.trials)), *([CLOSING] if self._closing else []))
        self._to_write = dict.fromkeys(index for index in everything if self._refusals[index] < REFUSALS)
        self._settling.clear()


def _sentence(error: Exception) -> str:
    text = " ".join(redact(str(error)).split()) or type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."
