"""The terminal's console and standard streams, which may be closed, redirected or a notebook's."""

from __future__ import annotations

import io
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import rich.console

from orchestrator.core.redact import shown

EXIT_UNREAD = 141
"""128 + SIGPIPE, as shells report a program that writes to a pipe whose reader has left."""


def show_what_can_be_shown() -> None:
    """Print `?` for a character that a stream's encoding lacks, for example a dash in latin-1, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def say(text: object, *, amiss: bool = False) -> None:
    """Print a text, made safe to display: it may contain foreign text, for example a file name or an error message.

    Args:
        text: text to print
        amiss: print to standard error instead of standard output
    """
    try:
        print(shown(text), file=sys.stderr if amiss else sys.stdout)
    except BrokenPipeError:
        unread()


def unread() -> None:
    """End the process with EXIT_UNREAD, because the reader of its output has left, for example `head`.

    In another thread than the main one, only the line is lost; the main thread's next line ends the process.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not _flushed(stream):
            os.dup2(nowhere, stream.fileno())  # else Python complains at exit that it cannot flush
    sys.exit(EXIT_UNREAD)


@contextmanager
def ended_quietly() -> Iterator[None]:
    """End the process without a message if the reader of its output has left."""
    try:
        yield
    except BrokenPipeError:
        unread()
    finally:
        if sys.stdout is not None and not _flushed(sys.stdout):
            unread()


def _flushed(stream: TextIO) -> bool:
    """Flush a stream; return False if its reader has left."""
    try:
        stream.flush()
    except BrokenPipeError:
        return False
    except OSError:  # a full disk, which Python reports at exit
        pass
    return True


class Console(rich.console.Console):
    """Rich's console, except that it ends the process with EXIT_UNREAD if the reader of its output has left."""

    def on_broken_pipe(self) -> None:
        """End the process; Rich would end it with status 1."""
        unread()
