"""Fixtures of the fault tests: commands that are always ended, and an undisturbed sweep to compare with."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_commands import SWEEP, Command


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", type=int, default=int(os.environ.get("CHAOS", "10")), help="kills (CHAOS)")


@pytest.fixture
def start() -> Iterator[Callable[..., Command]]:
    """Function that starts commands; processes that are left are killed after the test."""
    started: list[Command] = []

    def command(folder: Path, *arguments: str, **options: Any) -> Command:
        started.append(Command(folder, *arguments, **options))
        return started[-1]

    yield command
    for each in started:
        for pid in (each.process.pid, *each.processes()) if each.process.poll() is None else each.processes():
            os.kill(pid, signal.SIGKILL)
        if each.process.poll() is None:
            each.process.wait(30)


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a sweep that ran in one process without faults."""
    folder = tmp_path_factory.mktemp("undisturbed") / "sweep"
    command = Command(folder, *SWEEP, "cluster=inline", "tracking=none")
    assert command.wait() == 0, command.stderr
    return folder
