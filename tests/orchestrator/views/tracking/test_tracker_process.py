from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
from factories import finished, make_plan, make_records, sweep_info

from orchestrator.core.events import StageEvent, SweepInfo
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.views.tracking.process import TrackerProcess
from orchestrator.views.tracking.tracker import MlflowTracker

PLAN = make_plan(methods=("l1_unstructured",), seeds=(0,))
RECORDS = make_records(PLAN)


class Diary:
    """A tracker that writes down what it is told, and how it is treated."""

    def __init__(self, path: Path, slow: float = 0.0, *, warn: Callable[[str], None]) -> None:
        self.complete = False
        self._path = path
        self._slow = slow
        self._warn = warn
        self._write(f"pid {os.getpid()}")

    def start(self, sweep: SweepInfo, plan: Plan, finished: Mapping[str, StageRecord]) -> None:
        time.sleep(self._slow)
        self._write(f"start {sweep.name} {len(plan.trials)} {len(finished)}")
        print("a library prints this")

    def record(self, event: StageEvent) -> None:
        self._write(f"record {event.key}")

    def finish(self, status: str, report: Mapping[str, bytes]) -> None:
        self._write(f"finish {status} {sorted(report)}")
        self._warn("almost done")
        self.complete = True

    def _write(self, line: str) -> None:
        with self._path.open("a") as file:
            file.write(line + "\n")


def masks(key: str, name: str) -> bytes:
    return b"masks"


def wait_for(path: Path, text: str) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"{text!r} was not written"
        time.sleep(0.02)
    return path.read_text()


def test_what_the_driver_says_arrives_in_order_in_another_process(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = TrackerProcess(partial(Diary, tmp_path / "diary"), warnings.append)
    tracker.start(sweep_info(), PLAN, {})
    for record in RECORDS.values():
        tracker.record(finished(record))
    tracker.finish("finished", {"a.txt": b"a"})

    pid, start, *events, finish = (tmp_path / "diary").read_text().splitlines()
    assert pid != f"pid {os.getpid()}"
    assert start == "start synthetic 2 0"
    assert events == [f"record {key}" for key in RECORDS]
    assert finish == "finish finished ['a.txt']"
    assert tracker.complete
    assert warnings == ["almost done"]


def test_nothing_waits_but_the_end(tmp_path: Path) -> None:
    begun = time.monotonic()
    tracker = TrackerProcess(partial(Diary, tmp_path / "diary", 2.0))
    tracker.start(sweep_info(), PLAN, {})
    for _ in range(200):
        for record in RECORDS.values():
            tracker.record(finished(record))
    assert time.monotonic() - begun < 1.0

    tracker.finish("finished", {})
    assert time.monotonic() - begun > 2.0
    assert (tmp_path / "diary").read_text().count("record ") == 200 * len(RECORDS)


def test_a_process_that_dies_is_told(tmp_path: Path) -> None:
    warnings: list[str] = []
    tracker = TrackerProcess(partial(Diary, tmp_path / "diary"), warnings.append)
    tracker.start(sweep_info(), PLAN, {})
    pid = int(wait_for(tmp_path / "diary", "start").split()[1])
    os.kill(pid, signal.SIGKILL)
    tracker.record(finished(next(iter(RECORDS.values()))))
    tracker.finish("finished", {})

    assert not tracker.complete
    (warning,) = warnings
    assert "python -m orchestrator.sync synthetic" in warning


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_of_the_whole_group_leaves_it_alive(number: signal.Signals, tmp_path: Path) -> None:
    tracker = TrackerProcess(partial(Diary, tmp_path / "diary"))
    pid = int(wait_for(tmp_path / "diary", "pid").split()[1])
    os.kill(pid, number)
    tracker.start(sweep_info(), PLAN, {})
    tracker.finish("killed", {})

    assert tracker.complete


def test_it_ends_with_the_block_that_holds_it(tmp_path: Path) -> None:
    with TrackerProcess(partial(Diary, tmp_path / "diary")) as tracker:
        pid = int(wait_for(tmp_path / "diary", "pid").split()[1])

    assert not Path(f"/proc/{pid}").exists()
    assert not tracker.complete


def test_an_error_closes_the_view_as_killed(tmp_path: Path) -> None:
    def unread(text: str) -> None:
        raise BrokenPipeError

    def sweep() -> None:
        with TrackerProcess(partial(Diary, tmp_path / "diary"), unread) as tracker:
            tracker.start(sweep_info(), PLAN, {})
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        sweep()
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "finish killed []"


def test_it_dies_with_its_driver(tmp_path: Path) -> None:
    import subprocess

    code = (
        "import time; from functools import partial; from pathlib import Path; from test_tracker_process import *\n"
        f"tracker = TrackerProcess(partial(Diary, Path({str(tmp_path / 'diary')!r}))); time.sleep(60)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path])),
    }
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment)
    pid = int(wait_for(tmp_path / "diary", "pid").split()[1])
    driver.kill()
    driver.wait()

    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the process outlives its driver"
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_mlflow_is_written_without_being_imported_here(tmp_path: Path, empty_database: bytes) -> None:
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    warnings: list[str] = []
    tracker = TrackerProcess(partial(MlflowTracker, masks, uri=uri), warnings.append)
    tracker.start(sweep_info(), PLAN, {})
    for record in RECORDS.values():
        tracker.record(finished(record))
    tracker.finish("finished", {})

    from mlflow import MlflowClient

    assert tracker.complete
    assert warnings == []
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("pruning")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED"] * 3
