"""Trials of several processes on Ray: equal bits, also after the death of any of their processes, and none is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from own_rank_cases import shown

from orchestrator.core.records import StageRecord
from orchestrator.store.store import Store

ROOT = Path(__file__).parents[3]
WORDS = (
    *("parallel=ddp", "parallel.processes=2", "cluster.cpus_per_trial=2", "tracking=none", "schedule=one_shot"),
    *("model=mlp", "model.hidden=[16]", "model.dropout=0.1", "train.checkpoint_minutes=0.01", "finetune.epochs=5"),
    *("train.epochs=40", "cluster.backoff=0.1"),
)
"""A trial whose dense training takes some seconds."""
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several starts of Ray each


def start(folder: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a sweep in a folder."""
    folder.mkdir(exist_ok=True)
    paths = os.pathsep.join([str(ROOT / "tests" / "without_figures"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "orchestrator", *WORDS, *more]
    with (folder / "out.txt").open("ab") as output:
        return subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True, stdout=output, stderr=output
        )


def results(folder: Path) -> dict[str, Any]:
    """Return the results of all stages."""
    store = Store(str(folder / "store"))
    records: dict[str, StageRecord] = dict(store.finished(store.stages.known()))
    return {key: [record.result(), store.read(key, "weights.safetensors")] for key, record in records.items()}


def processes_of(driver: int, name: str) -> list[int]:
    """Return the processes below a driver whose title begins with a name."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            session = int((path / "stat").read_text().rpartition(")")[2].split()[3])
        except (OSError, ValueError):
            continue
        if title.startswith(name) and session == driver:
            found.append(int(path.name))
    return found


def waited_for(driver: subprocess.Popen[bytes], name: str) -> list[int]:
    """Wait for a process of a driver; return none if the driver ends before."""
    while driver.poll() is None:
        if found := processes_of(driver.pid, name):
            return found
        time.sleep(0.05)
    return []


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of a quiet run."""
    folder = tmp_path_factory.mktemp("quiet")
    assert start(folder).wait(200) == 0, (folder / "out.txt").read_text()
    return results(folder)


def test_the_same_sweep_again_has_the_same_bits(expected: dict[str, Any], tmp_path: Path) -> None:
    assert start(tmp_path / "again").wait(200) == 0
    assert results(tmp_path / "again") == expected
    assert len(expected) == 2


@pytest.mark.parametrize("victim", ["ray::rank 1", "ray::segment", "driver"])
def test_a_killed_process_changes_no_bit_and_leaves_none(
    victim: str, expected: dict[str, Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    draws = random.Random(victim)
    kills = max(1, int(request.config.getoption("--chaos", 10)) // 5)
    driver = start(tmp_path)
    for _ in range(kills):
        if not waited_for(driver, "ray::rank 1"):
            break
        time.sleep(draws.uniform(0.0, 2.0))
        targets = [driver.pid] if victim == "driver" else processes_of(driver.pid, victim)
        for target in targets[:1]:
            os.kill(target, signal.SIGKILL)
        if victim == "driver":
            driver.wait()
            end = time.monotonic() + 10
            while processes_of(driver.pid, "ray::") and time.monotonic() < end:
                time.sleep(0.1)
            assert not processes_of(driver.pid, "ray::"), "no process is left after ten seconds"
            driver = start(tmp_path)
        else:
            time.sleep(3.0)  # so that one attempt is lost by one kill
    if driver.wait(300):
        assert start(tmp_path).wait(300) == 0  # more losses than retries
    assert results(tmp_path) == expected


def test_an_interrupt_ends_all_processes_at_one_step_with_a_checkpoint(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    driver = start(tmp_path)
    checkpoints = Store(str(tmp_path / "store")).checkpoints
    while driver.poll() is None and not checkpoints.known():
        time.sleep(0.05)
    os.kill(driver.pid, signal.SIGINT)

    assert driver.wait(60) == 130
    assert not processes_of(driver.pid, "ray::")
    assert checkpoints.known()
    assert start(tmp_path).wait(200) == 0
    assert results(tmp_path) == expected


def test_a_rank_that_hangs_is_found_and_told(expected: dict[str, Any], tmp_path: Path) -> None:
    driver = start(tmp_path, "cluster.stage_timeout=30")
    assert waited_for(driver, "ray::rank 1")
    time.sleep(2.0)
    for target in processes_of(driver.pid, "ray::rank 1"):
        os.kill(target, signal.SIGSTOP)
    code, told = driver.wait(300), (tmp_path / "out.txt").read_text()

    assert code == 0
    assert "rank 0 lost rank 1 of the trial" in told or "it hung, and took longer than" in told
    assert results(tmp_path) == expected


NOTED = """

import os
from pathlib import Path


def noted(model, task, data, config, context):
    with (Path(__file__).parent / "processes").open("a") as file:
        file.write(f"{os.getpid()} {context.rank} of {context.world_size}\\n")
    train(model, task, data, config, context)
"""
"""Notes the processes that call the function of the page."""


def test_a_training_function_divides_its_batches_itself_in_processes_of_its_own(tmp_path: Path) -> None:
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "mine.py").write_text(shown("several-processes.md", "several") + NOTED)
        own = ("train._target_=mine.noted", "finetune._target_=mine.noted", "train.epochs=3", "model.dropout=0")
        assert start(folder, *own).wait(200) == 0, (folder / "out.txt").read_text()

    assert results(tmp_path / "first") == results(tmp_path / "second")
    assert len(results(tmp_path / "first")) == 2
    calls = {tuple(line.split(" ", 1)) for line in (tmp_path / "first" / "processes").read_text().splitlines()}
    assert sorted(role for _, role in calls)[-2:] == ["0 of 2", "1 of 2"]
    assert len({process for process, _ in calls}) == len(calls), "no process had two roles, one of them the preflight's"
