"""The console that a comparison and a sweep's display are printed on."""

from __future__ import annotations

import rich.console

from orchestrator.views.terminal.standard_streams import unread


class Console(rich.console.Console):
    """Rich's console, which ends the process as all commands end when the reader of the output has left."""

    def on_broken_pipe(self) -> None:
        """End the process; Rich would end it with status 1."""
        unread()
