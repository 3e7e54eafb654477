"""Entry point of `python -m orchestrator.sync`, see `orchestrator.commands.sync_command`."""

from orchestrator.__main__ import run_command

if __name__ == "__main__":
    run_command("sync")
