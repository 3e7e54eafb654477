"""Console for a comparison and for a sweep's display."""

from __future__ import annotations

import rich.console

from orchestrator.views.terminal.standard_streams import unread


class Console(rich.console.Console):
    """Rich's console, except that it ends the process with EXIT_UNREAD if the reader of its output has left."""

    def on_broken_pipe(self) -> None:
        """End the process; Rich would end it with status 1."""
        unread()
