"""The standard streams of our commands: characters that they lack, and readers that have left."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from orchestrator.core.redact import shown

EXIT_UNREAD = 141
"""128 + SIGPIPE, as shells report a program that writes to a pipe whose reader has left."""


def show_what_can_be_shown() -> None:
    """Print `?` for a character that a stream's encoding lacks, as latin-1 lacks the dash: it would raise otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def say(text: object, *, amiss: bool = False) -> None:
    """Print what may be shown of a text that others had a hand in, such as the name of a file or a message."""
    try:
        print(shown(text), file=sys.stderr if amiss else sys.stdout)
    except BrokenPipeError:
        unread()


def unread() -> None:
    """End the process with EXIT_UNREAD: the reader of its output has left, as `head` does.

    A thread only loses its line; the next line of the main thread ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not _flushed(stream):
            os.dup2(nowhere, stream.fileno())  # or Python says at exit that it cannot flush
    sys.exit(EXIT_UNREAD)


@contextmanager
def ended_quietly() -> Iterator[None]:
    """End the process without a word where the reader of its output has left."""
    try:
        yield
    except BrokenPipeError:
        unread()
    finally:
        if sys.stdout is not None and not _flushed(sys.stdout):
            unread()


def _flushed(stream: TextIO) -> bool:
    """Flush a stream; say whether somebody reads it."""
    try:
        stream.flush()
    except BrokenPipeError:
        return False
    except OSError:  # a full disk, which Python tells at exit
        pass
    return True
