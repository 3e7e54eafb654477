"""The standard streams of our commands: what they cannot show must not end a sweep."""

from __future__ import annotations

import io
import sys

from orchestrator.core.redact import shown


def show_what_can_be_shown() -> None:
    """Print `?` for a character that a stream's encoding lacks, as latin-1 lacks the dash: it would raise otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def say(text: object, *, amiss: bool = False) -> None:
    """Print what may be shown of a text that others had a hand in, such as the name of a file or a message."""
    print(shown(text), file=sys.stderr if amiss else sys.stdout)
