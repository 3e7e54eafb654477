"""The standard streams of our commands: what they cannot show must not end a sweep."""

from __future__ import annotations

import io
import sys


def show_what_can_be_shown() -> None:
    """Print `?` for a character that a stream's encoding lacks, as latin-1 lacks the dash: it would raise otherwise."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
