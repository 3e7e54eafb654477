"""`python -m orchestrator.compare`: the command `orchestrator.commands.compare_command`."""

from orchestrator.__main__ import run_command

if __name__ == "__main__":
    run_command("compare")
