"""Ctrl-C and SIGTERM: the first asks the sweep to stop at the next batch, the second leaves at once."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

EXIT_INTERRUPTED = 130


@dataclass
class Interrupt:
    """Whether the sweep was asked to stop."""

    requested: bool = False


@contextmanager
def cancelling(cancel: Callable[[], None]) -> Iterator[Interrupt]:
    """Call `cancel` on the first SIGINT or SIGTERM and end the process on the second; restore the handlers after.

    Enter it after `ray.init`, which installs handlers of its own.
    """
    interrupt = Interrupt()

    def handle(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the signature of a handler
        if interrupt.requested:
            os._exit(EXIT_INTERRUPTED)
        interrupt.requested = True
        print("\nStopping at the next batch; what finished is kept. Once more to leave at once.", file=sys.stderr)
        cancel()

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
