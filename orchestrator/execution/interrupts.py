"""Ctrl-C, SIGTERM and a closed terminal: the first asks the sweep to stop at the next batch, the second leaves at once.

Before anything runs the first leaves at once too: nothing is lost, as the store is whole at every moment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

EXIT_INTERRUPTED = 130
SENT_TO_ALL = (signal.SIGTERM, signal.SIGHUP)
"""What `timeout`, systemd, Slurm or a closed terminal send to all processes, though the driver is to end the others."""
SIGNALS = (signal.SIGINT, *SENT_TO_ALL)

STOPPING = "Stopping at the next batch. Once more to leave at once."
FINISHING = "All is done but the report, which is being written. Once more to leave at once."
LEAVING = "Interrupted; what finished is kept: the same command runs the rest."
INTERRUPTED = "Interrupted."
"""Last words of a command that trains nothing."""
SPARED: set[int] = set()
"""Processes that clear up after this one, and so must outlive it by a moment."""


def leave(_signum: int = 0, _frame: FrameType | None = None, *, saying: str = LEAVING) -> NoReturn:
    """End this process and all that it has started, now."""
    _say(saying)
    _kill_descendants()
    os._exit(EXIT_INTERRUPTED)


def leave_when_interrupted() -> None:
    """Leave at once on every signal from now on; those that were ignored when the process began stay so."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, leave)


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """Leave at once on Ctrl-C, as during imports, where a KeyboardInterrupt would print a traceback or be swallowed."""
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, partial(leave, saying=INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """End the process on Ctrl-C without a traceback, once all that is open has been closed."""
    told = sys.unraisablehook

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        """Leave where the interrupt came in a callback, which would swallow it."""
        if isinstance(found.exc_value, KeyboardInterrupt):
            leave(saying=INTERRUPTED)
        told(found)

    sys.unraisablehook = unraisable
    try:
        yield
    except KeyboardInterrupt:
        leave(saying=INTERRUPTED)
    finally:
        sys.unraisablehook = told


class Interruptible:
    """Within it the first signal is passed to whoever can stop the work, and the second leaves at once."""

    def __init__(self) -> None:
        self.requested = False
        """Whether the work was asked to stop."""
        self._cancel: Callable[[], None] | None = None
        self._working = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in SIGNALS}
        self._install()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def works(self, cancel: Callable[[], None]) -> None:
        """The work begins: the first signal calls `cancel`. Call this after `ray.init`, which has its own handlers."""
        self._cancel, self._working = cancel, True
        self._install()

    def worked(self) -> bool:
        """The work has ended, and what follows is short; return whether it was asked to."""
        self._working = False
        return self.requested

    def _install(self) -> None:
        for number, handler in self._previous.items():
            if handler is not signal.SIG_IGN or number == signal.SIGINT:
                signal.signal(number, self._handle)

    def _handle(self, _signum: int, _frame: FrameType | None) -> None:
        if self.requested or self._cancel is None:
            leave()
        self.requested = True
        _say(STOPPING if self._working else FINISHING)
        self._cancel()


def _say(text: str) -> None:
    """Write past Python's buffers, which the signal may have found half-way through a write."""
    os.write(2, f"\n{text}\n".encode())


def _kill_descendants() -> None:
    """Kill the processes that this one has started, and theirs, where the system says which those are."""
    for _ in range(2):  # again, for those that were being started meanwhile
        for pid in set(_descendants(os.getpid())) - SPARED:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        children.setdefault(parent, []).append(int(stat.parent.name))
    found = list(children.get(root, ()))
    for pid in found:
        found.extend(children.get(pid, ()))
    return found
