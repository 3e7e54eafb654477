"""Handlers for Ctrl-C, SIGTERM and a closed terminal.

The first signal asks the sweep to stop at the next batch, the second ends the process at once. Before any stage runs,
the first signal ends it at once, too. No result is lost, as the store is consistent at every moment.
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
"""Signals that `timeout`, systemd, Slurm or a closed terminal send to all processes of a sweep, workers included.

Workers must not act on them, since the driver ends the workers.
"""
SIGNALS = (signal.SIGINT, *SENT_TO_ALL)

STOPPING = "Stopping at the next batch. Interrupt again to leave at once."
FINISHING = "All stages have ended; the report is being written. Interrupt again to leave at once."
LEAVING = "Interrupted; what finished is kept: the same command runs the rest."
INTERRUPTED = "Interrupted."
"""Last line of an interrupted command that trains nothing."""
SPARED: set[int] = set()
"""Numbers of processes that clean up after this one, so they must outlive it for a moment."""


def leave(_signum: int = 0, _frame: FrameType | None = None, *, saying: str = LEAVING) -> NoReturn:
    """End this process and all processes that it has started, at once."""
    _say(saying)
    _say_no_more()
    _kill_descendants()
    os._exit(EXIT_INTERRUPTED)


def leave_when_interrupted(saying: str = LEAVING) -> None:
    """End the process at once on every signal from now on; signals that are ignored stay ignored."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, partial(leave, saying=saying))


@contextmanager
def leaving_on_interrupt() -> Iterator[None]:
    """End the process at once on Ctrl-C within the context.

    For imports, during which a KeyboardInterrupt would print a traceback or be swallowed.
    """
    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, partial(leave, saying=INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def ending_on_interrupt() -> Iterator[None]:
    """End the process on Ctrl-C without a traceback, after open files and contexts have been closed."""
    previous = sys.unraisablehook

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        """End the process if the interrupt came in a callback, which would swallow it."""
        if isinstance(found.exc_value, KeyboardInterrupt):
            leave(saying=INTERRUPTED)
        previous(found)

    sys.unraisablehook = unraisable
    try:
        yield
    except KeyboardInterrupt:
        leave(saying=INTERRUPTED)
    finally:
        sys.unraisablehook = previous


class Interruptible:
    """Context in which the first signal cancels the work, and the second ends the process at once."""

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
        """Have the first signal call `cancel` from now on. Call this after `ray.init`, which sets its own handlers."""
        self._cancel, self._working = cancel, True
        self._install()

    def worked(self) -> bool:
        """Note that the work has ended; return whether it was asked to stop."""
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
    """Write to standard error without Python's buffers, as the signal may have interrupted a write to them."""
    os.write(2, f"\n{text}\n".encode())


def _say_no_more() -> None:
    """Drop what threads still print: those that talk to the killed processes report every lost connection."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _kill_descendants() -> None:
    """Kill all descendants of this process, on systems with /proc."""
    for _ in range(2):  # the second time for processes that started during the first
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
