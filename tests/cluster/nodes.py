"""Real Ray nodes on loopback addresses, separate from every other Ray on this machine, ended by process id."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sessions import kill, processes_in

HEAD = "127.0.0.2"
REPOSITORY = Path(__file__).parents[2]
OWN_MOUNTS = ("unshare", "--map-root-user", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"')
"""Command prefix that mounts an empty folder over the next argument, then runs the rest."""
NOTICE_THE_DEAD = {
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


class Nodes:
    """Nodes of one cluster, each in its own directory."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.port, self.dashboard = _free_ports(2)
        self.token = secrets.token_hex(32)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "MLFLOW_"))}
        self.environment = {
            **kept,
            **NOTICE_THE_DEAD,
            "HOME": str(root),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(REPOSITORY),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": self.token,
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        """Number of a node, the last one of its address -> the process that leads its session."""

    @property
    def address(self) -> str:
        """Address that drivers and further nodes join."""
        return f"{HEAD}:{self.port}"

    @property
    def jobs(self) -> str:
        """Address that jobs are submitted to."""
        return f"http://{HEAD}:{self.dashboard}"

    def head(self, *arguments: str, dashboard: bool = False, cpus: int = 2) -> Path:
        """Start the head node and return its working directory."""
        served = (
            (f"--dashboard-host={HEAD}", f"--dashboard-port={self.dashboard}")
            if dashboard
            else ("--include-dashboard=false",)
        )
        port, temporary = f"--port={self.port}", f"--temp-dir={self.root / 't'}"
        return self._start(2, HEAD, "--head", port, temporary, f"--num-cpus={cpus}", *served, *arguments)

    def join(self, number: int, *arguments: str, cpus: int = 1, without: Path | None = None) -> Path:
        """Start a further node on 127.0.0.`number` and return its working directory.

        The folder `without` is empty for the processes of this node, as on a machine that does not mount it.
        """
        address = f"127.0.0.{number}"
        prefix = () if without is None else (*OWN_MOUNTS, str(without))
        joins = (f"--address={self.address}", f"--num-cpus={cpus}")
        return self._start(number, address, *joins, *arguments, prefix=prefix)

    def stop(self) -> None:
        """Kill every node that was started here, like a power cut, as a clean end takes 10 s for each node."""
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def sessions(self) -> dict[int, int]:
        """Number of each node -> session of its processes."""
        return {number: process.pid for number, process in self._processes.items()}

    def kill(self, number: int) -> None:
        """Kill all processes of a node at once; it may join again."""
        process = self._processes.pop(number)
        kill([process.pid])
        process.wait()

    def silence(self, number: int) -> None:
        """Stop all processes of a node for ever, without ending them; no connection to them breaks."""
        for pid in processes_in([self._processes[number].pid]):
            os.kill(pid, signal.SIGSTOP)

    def _start(self, number: int, address: str, *arguments: str, prefix: tuple[str, ...] = ()) -> Path:
        name = "head" if address == HEAD else f"node{number}"
        folder, log = self.root / name, self.root / f"{name}.log"
        folder.mkdir(exist_ok=True)
        (agent,) = _free_ports(1)  # by default Ray takes one fixed port, which another cluster may hold
        options = ("--block", f"--node-ip-address={address}", "--object-store-memory=100000000")
        options += (f"--dashboard-agent-listen-port={agent}",)
        command = [*prefix, *ray("start", *options, *arguments)]
        with log.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=folder, env=self.environment, stdout=file, stderr=file, start_new_session=True
            )
        self._processes[number] = process
        while "Ray runtime started" not in log.read_text():
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        return folder


@contextmanager
def nodes() -> Iterator[Nodes]:
    """Nodes in a folder with a short name, as Ray's sockets lie there; all nodes end after the test."""
    root = Path(tempfile.mkdtemp(prefix="ray"))
    found = Nodes(root)
    try:
        yield found
    finally:
        found.stop()
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Two nodes of one CPU, and a head without CPUs, which the driver joins."""
    with nodes() as found:
        found.head(cpus=0)
        found.join(3)
        found.join(4)
        yield found


def ray(*arguments: str) -> list[str]:
    """Return the path of the `ray` command of this interpreter."""
    return [sys.executable, "-m", "ray.scripts.scripts", *arguments]


def run(command: list[str], folder: Path, environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command and wait until it ends."""
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind((HEAD, 0))
    ports = [int(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    return ports
