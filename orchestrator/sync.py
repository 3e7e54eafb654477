"""`python -m orchestrator.sync [SWEEP ...]`: complete the MLflow view of sweeps from the store. Trains nothing."""

from __future__ import annotations

if __name__ == "__main__":  # before the imports below, which an interrupt would end with a traceback
    from orchestrator.__main__ import run_command

    run_command("sync")

from collections.abc import Sequence

from orchestrator.execution import interrupts
from orchestrator.sweep.sync_views import sync_command
from orchestrator.views.terminal.streams import show_what_can_be_shown


def main(arguments: Sequence[str] | None = None) -> int:
    """Complete the views; return the exit status."""
    interrupts.leave_when_interrupted()
    show_what_can_be_shown()
    return sync_command(arguments)
