"""Entry point of `python -m orchestrator.gate`, see `orchestrator.commands.gate_command`."""

from orchestrator.__main__ import run_command

if __name__ == "__main__":
    run_command("gate")
