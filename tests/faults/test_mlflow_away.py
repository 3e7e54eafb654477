"""An unreachable MLflow server costs no result: the sweep reports it, and the view is completed from the store."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_commands import SWEEP, Command, finished_stages, plan_of
from view import Run, assert_complete, runs_in

from orchestrator.commands.sync_command import main as sync_command
from orchestrator.views.tracking import view_writer

Start = Callable[..., Command]
INLINE = ("cluster=inline", "finetune.epochs=60", "finetune.eval_every=100000")
pytestmark = pytest.mark.slow


class Server:
    """MLflow server on loopback that can be killed and started again."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server, unless it runs, and wait until it answers."""
        if self._process is not None:
            return
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        options += ["--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        options += ["--artifacts-destination", str(self.folder / "artifacts")]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mlflow", "server", *options],
                env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(f"{self.uri}/health", timeout=5).close()
                return
            except OSError:
                assert time.monotonic() < deadline, (self.folder / "log").read_text()
                time.sleep(0.2)

    def stop(self) -> None:
        """Kill the server and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def runs(self, experiment: str) -> list[Run]:
        """Return the runs in the server's database."""
        return runs_in(self.folder / "server.db", self.folder / "artifacts", experiment)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Server for all tests, as a new database takes long to make; not started yet. Each test has its own experiment."""
    made = Server(tmp_path_factory.mktemp("mlflow") / "server")
    yield made
    made.stop()


@pytest.mark.filterwarnings("ignore")  # mlflow's own, on import
def test_a_server_away_from_the_start_is_completed_by_sync(
    start: Start, tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "sweep"
    server.stop()
    secret = f"tracking.uri={server.uri.replace('//', '//me:hunter2@')}"
    command = start(folder, *SWEEP, INLINE[0], secret, "tracking.experiment=away")

    assert command.wait() == 3, command.stderr
    assert "hunter2" not in command.stdout + command.stderr
    assert "does not hold all of this sweep; the store does" in command.stderr
    assert "Traceback" not in command.stderr
    advice = shlex.split(command.stderr.splitlines()[-1])[3:]
    advice[advice.index("--uri") + 1] = server.uri  # the password is not shown
    with monkeypatch.context() as here:
        here.chdir(folder)
        here.setattr(view_writer, "PATIENCE", 1.0)  # the sweep has just waited this long for MLflow
        assert sync_command(advice) == 3
    server.start()
    completed = start(folder, *advice, module="orchestrator.sync")
    assert completed.wait() == 0, completed.stderr
    assert_complete(folder, server.runs("away"))


def test_a_server_killed_and_started_in_mid_sweep_misses_nothing(start: Start, tmp_path: Path, server: Server) -> None:
    folder = tmp_path / "sweep"
    server.start()
    command = start(folder, *SWEEP, *INLINE, f"tracking.uri={server.uri}", "tracking.experiment=gap")
    command.until_stages(3)
    server.stop()
    command.until_stages(5)
    server.start()

    assert command.wait() == 0, command.stderr
    assert "Traceback" not in command.stderr
    assert_complete(folder, server.runs("gap"))


def test_runs_that_a_dead_driver_left_running_are_finished_by_the_next(
    start: Start, tmp_path: Path, server: Server
) -> None:
    folder = tmp_path / "sweep"
    sweep = (*SWEEP, *INLINE, f"tracking.uri={server.uri}", "tracking.experiment=dead")
    server.start()
    dead = start(folder, *sweep)
    dead.until_stages(3)
    dead.send(signal.SIGSTOP)  # so that the sweep cannot end while it still writes to MLflow
    dead.until(lambda: any(run.status == "RUNNING" for run in server.runs("dead")))
    dead.send(signal.SIGKILL)
    dead.wait()
    assert "RUNNING" in {run.status for run in server.runs("dead")}
    assert finished_stages(folder) < len(plan_of(folder).stages)

    assert start(folder, *sweep).wait() == 0
    assert_complete(folder, server.runs("dead"))
