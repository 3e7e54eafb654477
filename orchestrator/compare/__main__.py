"""Entry point of `python -m orchestrator.compare`, see `orchestrator.commands.compare_command`."""

from orchestrator.__main__ import run_command

if __name__ == "__main__":
    run_command("compare")
