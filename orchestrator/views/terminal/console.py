"""The console that a comparison and a sweep's display are printed on."""

from __future__ import annotations

import rich.console

from orchestrator.views.terminal.streams import unread


class Console(rich.console.Console):
    """A console of Rich's that ends the process as all commands end it when the reader of the output has left."""

    def on_broken_pipe(self) -> None:
        """Take the place of Rich's way, which ends with status 1."""
        unread()
