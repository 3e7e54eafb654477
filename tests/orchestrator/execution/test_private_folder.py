"""Private folder of the sweep's own Ray, the process that removes it, and the search for other clusters. No Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from orchestrator.config.cluster import Cluster
from orchestrator.execution.on_ray import embedded_ray
from orchestrator.execution.on_ray.embedded_ray import Address, ClusterError
from orchestrator.execution.on_ray.private_folder import LONGEST, private_folder

DRIVER = """
import os, sys
from orchestrator.execution.interrupts import leave
from orchestrator.execution.on_ray.private_folder import private_folder
with private_folder() as folder:
    os.makedirs(folder)
    os.chmod(folder, 0o777)  # as Ray does
    print(folder, flush=True)
    sys.stdin.readline()
    if "leave" in sys.argv:
        leave()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Empty temporary directory with a short name."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rt") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.delenv("RAY_TMPDIR", raising=False)
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


@pytest.fixture
def start() -> Iterator[Start]:
    """Function that starts processes with pipes for input and output; all end with the test."""
    with ExitStack() as stack:

        def popen(*command: str, executable: str = sys.executable) -> subprocess.Popen[str]:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(subprocess.Popen(command, executable=executable, text=True, **pipes))
            stack.callback(process.kill)
            return process

        yield popen


def lookalike(start: Start, program: str, *arguments: str) -> subprocess.Popen[str]:
    """Start a process that waits, with the command line of another program."""
    return start(program, "-c", "read forever", *arguments, executable="/bin/sh")


@pytest.mark.parametrize("end", ["", "leave", "killed"])
def test_the_folder_is_this_users_alone_and_goes_with_what_works_in_it(base: Path, start: Start, end: str) -> None:
    driver = start(sys.executable, "-c", DRIVER, end)
    assert driver.stdin is not None
    assert driver.stdout is not None
    folder = Path(driver.stdout.readline().strip())
    (private,) = base.iterdir()
    assert folder.parent == private
    assert private.stat().st_mode & 0o777 == 0o700
    (folder / "agent.out").write_text("")
    waiting = "echo waits >&3; read forever"
    agent = start("sh", "-c", f"exec 3>&1 >{folder}/agent.out; {waiting}", executable="/bin/sh")
    other = start("sh", "-c", f"exec 3>&1 4<{folder}/agent.out; {waiting}", executable="/bin/sh")
    for process in (agent, other):
        assert process.stdout is not None
        assert process.stdout.readline() == "waits\n"
    assert private.exists()

    if end == "killed":
        driver.send_signal(signal.SIGKILL)
    else:
        driver.stdin.write("\n")
        driver.stdin.flush()
    assert agent.wait(10) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while private.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert other.poll() is None


def test_sockets_fit_into_the_folder_wherever_the_temporary_directory_is(base: Path) -> None:
    far = base / ("x" * 80)
    far.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(far))
        with private_folder() as folder:
            assert folder.startswith("/tmp/pruning-ray-")
            assert len(f"{folder}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store") <= LONGEST


def test_the_private_rays_of_sweeps_are_no_clusters_to_join(base: Path, start: Start) -> None:
    before = embedded_ray._clusters()
    with private_folder() as folder:
        lookalike(start, "/x/raylet", "--gcs-address=10.9.8.7:1", f"--temp_dir={folder}")
        lookalike(start, "/x/raylet", "--gcs-address=10.9.8.7:2", "--temp_dir=/tmp/ray")
        lookalike(start, "/x/raylet", "--gcs-address=10.9.8.7:2", "--temp_dir=/tmp/other")
        lookalike(start, "/x/worker", "--gcs-address=10.9.8.7:3", "--temp_dir=/tmp/ray")
        deadline = time.monotonic() + 5
        while (found := embedded_ray._clusters() - before) != {"10.9.8.7:2"}:
            assert time.monotonic() < deadline, found
            time.sleep(0.02)


@pytest.mark.parametrize(
    ("clusters", "said"), [(set(), "none runs here"), ({"b:2", "a:1"}, "several run here: a:1, b:2")]
)
def test_the_cluster_that_runs_here_must_be_one(monkeypatch: pytest.MonkeyPatch, clusters: set[str], said: str) -> None:
    monkeypatch.setattr(embedded_ray, "_clusters", lambda: clusters)
    with pytest.raises(ClusterError) as refused:
        Address("auto").reach()
    assert str(refused.value).startswith(
        f"`cluster.address` (=auto) names no Ray cluster that this machine can join ({said})."
    )
    assert refused.value.exit_status == 2


def test_a_token_that_is_missing_is_said() -> None:
    error = ConnectionError("Failed to connect to Ray cluster at head:6379")
    error.__cause__ = RuntimeError("Last connection error: Authentication token is missing or incorrect")
    assert "The cluster's token is needed here, too: set RAY_AUTH_MODE=token." in str(
        Address("head:6379").refused(error)
    )


def test_a_temporary_directory_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "RAY_AUTH_MODE", "token"
    )  # ray keeps this from its import on, and other tests start their Ray with it
    import ray

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setenv("RAY_TMPDIR", "/gone")
    with (
        pytest.raises(ClusterError, match=r"Ray could not be started on this machine: .*No such file"),
        embedded_ray.connected(Address("local"), Cluster(), ""),
    ):
        pass
