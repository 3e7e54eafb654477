"""Entry point of `python -m orchestrator.export`, see `orchestrator.commands.export_command`."""

from orchestrator.__main__ import run_command

if __name__ == "__main__":
    run_command("export")
