"""Entry point of `python -m orchestrator.store`, see `orchestrator.commands.store_command`."""

from orchestrator.__main__ import run_command

if __name__ == "__main__":
    run_command("store")
