"""RayExecutor with real processes that die: nodes and drivers are killed. Slow."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes import DirectoryStore

pytestmark = pytest.mark.slow

DRIVER = """
import json, sys, threading
from pathlib import Path
from fakes import DirectoryStore, chain, plan_of, run_script
from orchestrator.config.cluster import Cluster
from orchestrator.execution.on_ray.ray_executor import RayExecutor

given = json.loads(sys.argv[1])
script = given["script"]
plan = plan_of(*(chain(f"t{i}", script, script) for i in range(given["trials"])))
root = Path(given["root"])
with RayExecutor(Cluster(**given["cluster"]), DirectoryStore(root), work=run_script, logs=root / "logs") as executor:
    if given.get("cancel_after"):
        threading.Timer(given["cancel_after"], executor.cancel).start()
    for event in executor.run(plan):
        host = event.failure.message if event.failure else ""
        print(json.dumps([event.kind, plan.stages[event.key].fields["name"], event.attempt, host]), flush=True)
"""

LEAVING = """
import sys, threading, time
from pathlib import Path
from fakes import DirectoryStore
from orchestrator.config.cluster import Cluster
from orchestrator.execution.on_ray.ray_executor import RayExecutor

executor = RayExecutor(Cluster(num_cpus=1), DirectoryStore(Path(sys.argv[1])))
executor.start()
import ray
held = [ray.put(number) for number in range(3000)]
closing = threading.Thread(target=executor.close)
closing.start()
while closing.is_alive():
    held.pop()
    time.sleep(0.0005)
print("references freed while Ray shut down:", 3000 - len(held))
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """Folder with a short name, as Ray's sockets lie below it."""
    folder = Path(tempfile.mkdtemp(prefix="ray"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def environment(root: Path) -> dict[str, str]:
    """Environment that separates these Rays from all others; its mark finds every descendant of a test."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    return {
        **kept,
        "HOME": str(root),
        "TMPDIR": str(root),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), str(Path(__file__).parents[3])]),
        "ORCHESTRATOR_TEST_MARK": uuid.uuid4().hex,
    }


def start_driver(root: Path, environment: dict[str, str], **given: object) -> subprocess.Popen[str]:
    (root / "store").mkdir(exist_ok=True)
    argument = json.dumps({"root": str(root / "store"), "script": {"sleep": 0.5}, "trials": 6, **given})
    command = [sys.executable, "-c", DRIVER, argument]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, cwd=root)


def marked(environment: dict[str, str]) -> list[str]:
    """Return the command lines of the live descendants of this test."""
    mark = f"ORCHESTRATOR_TEST_MARK={environment['ORCHESTRATOR_TEST_MARK']}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def wait_until_gone(environment: dict[str, str], seconds: float) -> list[str]:
    end = time.monotonic() + seconds
    while (left := marked(environment)) and time.monotonic() < end:
        time.sleep(0.2)
    return left


def test_nodes_leave_and_join_in_mid_sweep(root: Path, environment: dict[str, str]) -> None:
    health = {"RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000"}
    environment |= {**health, "RAY_health_check_failure_threshold": "3", "RAY_AUTH_MODE": "disabled"}
    port = _free_port()
    head = ["--head", "--node-ip-address=127.0.0.2", f"--port={port}", f"--temp-dir={root / 'a'}"]
    join = f"--address=127.0.0.2:{port}"
    nodes = [_start_node(root, environment, *head, "--include-dashboard=false")]
    kinds = []
    joined = False
    both = 0  # events at which two trials ran at once, so on two nodes of one CPU each, since the loss of one
    try:
        _wait_until_up(nodes[0], root / "nodes.log", 1)
        nodes.append(_start_node(root, environment, join, "--node-ip-address=127.0.0.3"))
        _wait_until_up(nodes[1], root / "nodes.log", 2)
        cluster = {"address": f"127.0.0.2:{port}", "backoff": 0.1, "cpus_per_trial": 1.0}
        script = {"until": str(root / "go"), "sleep": 2.0}  # so long that no trial ends before a node is lost
        running: set[str] = set()
        with start_driver(root, environment, cluster=cluster, trials=8, script=script) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                kind, name, *_ = json.loads(line)
                kinds.append(kind)
                (running.add if kind == "started" else running.discard)(name)
                both += joined and len(running) == 2
                if len(running) == 2 and not joined:
                    _wait_for(lambda: len([*(root / "store").glob("*.starts")]) == 2, driver)
                    _kill(nodes[1])
                    running.clear()
                    nodes.append(_start_node(root, environment, join, "--node-ip-address=127.0.0.4"))
                    _wait_until_up(nodes[2], root / "nodes.log", 3)
                    joined = True
                    (root / "go").touch()
        assert driver.returncode == 0
    finally:
        for node in nodes:
            _kill(node)
    assert both > 2, "the node that joined is used"
    assert (kinds.count("finished"), kinds.count("retried"), kinds.count("failed")) == (16, 1, 0)
    starts = [len(path.read_text()) for path in (root / "store").glob("*.starts")]
    assert sorted(starts) == [1] * 15 + [2]


def test_a_thread_may_free_references_while_another_leaves_ray(root: Path, environment: dict[str, str]) -> None:
    command = [sys.executable, "-c", LEAVING, str(root)]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr) == (0, "")
    assert int(result.stdout.rpartition(":")[2]) > 10


@pytest.mark.parametrize("how", ["to its end", "cancelled", "interrupts ignored"])
def test_nothing_is_left_running(how: str, root: Path, environment: dict[str, str]) -> None:
    given: dict[str, object] = {"cluster": {"num_cpus": 2}, "script": {"sleep": 0.1 if how == "to its end" else 30.0}}
    ignored = signal.signal(signal.SIGINT, signal.SIG_IGN) if how == "interrupts ignored" else None
    try:
        driver = start_driver(root, environment, **given, cancel_after=None if how == "to its end" else 1.0)
    finally:
        if ignored is not None:
            signal.signal(signal.SIGINT, ignored)
    with driver:
        out, _ = driver.communicate()
    assert driver.returncode == 0
    kinds = {json.loads(line)[0] for line in out.splitlines()}
    assert kinds - {"started"} == ({"finished"} if how == "to its end" else {"killed"})
    assert wait_until_gone(environment, 5.0) == []
    assert not [*root.glob(".ray"), *root.glob("pruning-ray-*")]


def test_a_killed_driver_takes_its_workers_along_and_the_next_goes_on(root: Path, environment: dict[str, str]) -> None:
    with start_driver(root, environment, cluster={"num_cpus": 2}) as driver:
        assert driver.stdout is not None
        for line in driver.stdout:
            if json.loads(line)[0] == "finished":
                driver.kill()  # read the rest of its output
    assert wait_until_gone(environment, 10.0) == []
    assert not [*root.glob("pruning-ray-*")]
    done = {path.name for path in (root / "store").iterdir() if len(path.name) == 64}
    assert done
    assert DirectoryStore(root / "store").finished(done).keys() == done


def test_where_no_cluster_answers_the_driver_says_so_soon(root: Path, environment: dict[str, str]) -> None:
    with socket.socket() as deaf:
        deaf.bind(("0.0.0.0", 0))
        deaf.listen()
        begun = time.monotonic()
        with start_driver(root, environment, cluster={"address": f"127.0.0.1:{deaf.getsockname()[1]}"}) as driver:
            driver.communicate()
    assert driver.returncode == 1
    assert time.monotonic() - begun < 20, "15 on a quiet machine; Ray alone tries for minutes"


def _start_node(root: Path, environment: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).parent / "ray"), "start", "--num-cpus=1", "--block", *arguments]
    with (root / "nodes.log").open("ab") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)


def _wait_until_up(node: subprocess.Popen[bytes], log: Path, count: int) -> None:
    _wait_for(lambda: log.read_text().count("Ray runtime started") == count, node)


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen[Any]) -> None:
    """Wait until a condition holds, while the process that brings it about is alive."""
    while not condition():
        assert process.poll() is None
        time.sleep(0.1)


def _kill(node: subprocess.Popen[bytes]) -> None:
    if node.poll() is None:
        os.killpg(node.pid, signal.SIGKILL)
        node.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.2", 0))
        return int(probe.getsockname()[1])
