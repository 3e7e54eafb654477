from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from diary import diary
from factories import finished, make_plan, make_records, sweep_info
from tracking_cases import masks

from orchestrator.views.tracking import process
from orchestrator.views.tracking.process import MOST_RESTARTS, TrackerProcess
from orchestrator.views.tracking.view_writer import ViewWriter

PLAN = make_plan(methods=("l1_unstructured",), seeds=(0,))
RECORDS = make_records(PLAN)


def wait_for(path: Path, text: str, times: int = 1) -> str:
    deadline = time.monotonic() + 30
    while not path.exists() or path.read_text().count(text) < times:
        assert time.monotonic() < deadline, f"{text!r} was not written"
        time.sleep(0.02)
    return path.read_text()


def pid_in(folder: Path, which: int = 1) -> int:
    lines = [line for line in wait_for(folder / "diary", "pid", which).splitlines() if line.startswith("pid")]
    return int(lines[which - 1].split()[1])


def test_a_record_is_pickled_without_what_another_thread_may_be_reading() -> None:
    """Else a sweep that reads `typed` at that moment kills the tracker's thread: "dictionary changed size"."""
    for record in RECORDS.values():
        assert record.typed
        again = pickle.loads(pickle.dumps(record))
        assert again == record
        assert "typed" not in vars(again)


def test_what_the_driver_says_arrives_in_order_in_another_process(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = TrackerProcess(diary(tmp_path), said.append)
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
    assert said == ["almost done"]


@pytest.mark.slow
def test_nothing_waits_but_the_end(tmp_path: Path) -> None:
    begun = time.monotonic()
    tracker = TrackerProcess(diary(tmp_path, slow=2.0), print)
    tracker.start(sweep_info(), PLAN, {})
    for _ in range(200):
        for record in RECORDS.values():
            tracker.record(finished(record))
    assert time.monotonic() - begun < 1.0

    tracker.finish("finished", {})
    assert time.monotonic() - begun > 2.0
    assert (tmp_path / "diary").read_text().count("record ") == 200 * len(RECORDS)


@pytest.mark.slow
def test_an_end_that_waits_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PAUSE", 0.1)
    said: list[str] = []
    tracker = TrackerProcess(diary(tmp_path, slow=0.6), said.append, server="http://host:5000")
    tracker.start(sweep_info(), PLAN, {})
    tracker.finish("finished", {})
    assert sum(each.startswith("Waiting for MLflow at http://host:5000, which does") for each in said) == 1


def test_a_process_that_dies_is_told_started_again_and_told_everything_again(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = TrackerProcess(diary(tmp_path), said.append)
    tracker.start(sweep_info(), PLAN, {})
    first, second, *_ = RECORDS.values()
    tracker.record(finished(first))
    wait_for(tmp_path / "diary", "record")
    os.kill(pid_in(tmp_path), signal.SIGKILL)
    pid_in(tmp_path, 2)
    tracker.record(finished(second))
    tracker.finish("finished", {})

    assert tracker.complete
    again = (tmp_path / "diary").read_text().splitlines()[4:]
    assert again == ["start synthetic 2 0", f"record {first.key}", f"record {second.key}", "finish finished []"]
    assert said == ["The process that writes to MLflow has died; it is started again.", "almost done"]


@pytest.mark.slow
def test_a_process_that_dies_each_time_is_given_up(tmp_path: Path) -> None:
    said: list[str] = []
    tracker = TrackerProcess(diary(tmp_path), said.append)
    tracker.start(sweep_info(), PLAN, {})
    for which in range(MOST_RESTARTS + 1):
        os.kill(pid_in(tmp_path, which + 1), signal.SIGKILL)
    tracker.finish("finished", {})

    assert not tracker.complete
    assert len(said) == MOST_RESTARTS + 1
    assert said[-1] == "The process that writes to MLflow has died; the store holds everything."


@pytest.mark.slow
def test_one_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENCE", 0.5)
    tracker = TrackerProcess(diary(tmp_path, slow=60), print)
    tracker.start(sweep_info(), PLAN, {})
    pid, begun = pid_in(tmp_path), time.monotonic()
    tracker.finish("finished", {})

    assert time.monotonic() - begun < 5
    assert not tracker.complete
    assert not Path(f"/proc/{pid}").exists()


def test_an_interrupted_sweep_waits_for_a_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "KILLED_LIMIT", 0.3)
    tracker = TrackerProcess(diary(tmp_path, slow=60), print)
    tracker.start(sweep_info(), PLAN, {})
    begun = time.monotonic()
    tracker.finish("killed", {})

    assert time.monotonic() - begun < 3
    assert not tracker.complete


def test_an_interrupt_of_the_whole_group_leaves_it_alive(tmp_path: Path) -> None:
    tracker = TrackerProcess(diary(tmp_path), print)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid_in(tmp_path), number)
    tracker.start(sweep_info(), PLAN, {})
    tracker.finish("killed", {})

    assert tracker.complete


def test_it_ends_with_the_block_that_holds_it(tmp_path: Path) -> None:
    with TrackerProcess(diary(tmp_path), print) as tracker:
        pid = pid_in(tmp_path)

    assert not Path(f"/proc/{pid}").exists()
    assert not tracker.complete


def test_an_error_closes_the_view_as_killed(tmp_path: Path) -> None:
    def unread(text: str) -> None:
        raise BrokenPipeError

    def sweep() -> None:
        with TrackerProcess(diary(tmp_path), unread) as tracker:
            tracker.start(sweep_info(), PLAN, {})
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        sweep()
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "finish killed []"


def test_it_dies_with_its_driver(tmp_path: Path) -> None:
    code = (
        "import time; from pathlib import Path; from diary import diary\n"
        "from orchestrator.views.tracking.process import TrackerProcess\n"
        f"tracker = TrackerProcess(diary(Path({str(tmp_path)!r})), print); time.sleep(60)"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path])),
    }
    driver = subprocess.Popen([sys.executable, "-c", code], env=environment)
    pid = pid_in(tmp_path)
    driver.kill()
    driver.wait()

    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the process outlives its driver"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
def test_mlflow_is_written_without_being_imported_here(tmp_path: Path, empty_database: bytes) -> None:
    (tmp_path / "mlflow.db").write_bytes(empty_database)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    said: list[str] = []
    tracker = TrackerProcess(partial(ViewWriter, read=masks, uri=uri, experiment="pruning"), said.append)
    tracker.start(sweep_info(), PLAN, {})
    for record in RECORDS.values():
        tracker.record(finished(record))
    tracker.finish("finished", {})

    from mlflow import MlflowClient

    assert tracker.complete
    assert said == []
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("pruning")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED"] * 3
