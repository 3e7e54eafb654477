from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from factories import finished, make_plan, make_records, sweep_info
from sampling import sampled

from orchestrator.core.errors import CannotKeep
from orchestrator.views.tracking import view_writer
from orchestrator.views.tracking.run_contents import SweepView
from orchestrator.views.tracking.view_writer import CLOSING, OPENING, Requests, ViewWriter

PLAN = make_plan(methods=("l1_unstructured",), seeds=(0, 1))
EVERYTHING = [OPENING, *range(len(PLAN.trials)), CLOSING]


class Refused(Exception):
    """Error of an MLflow that always refuses a run."""

    error_code = "INVALID_PARAMETER_VALUE"


class FakeRuns:
    """Runs that keep the written indices; `fault(index)` may raise."""

    def __init__(self, fault: Callable[[int], None] = lambda index: None) -> None:
        self.fault = fault
        self.held: set[tuple[int, int]] = set()
        self.writes: list[int] = []
        self.connections = 0
        self.said: list[str] = []
        self.requests = Requests()

    def connect(self, *_: object) -> FakeRuns:
        self.connections += 1
        return self

    def write(self, view: SweepView, index: int) -> bool:
        self.fault(index)
        state = (index, len(view.chain(index)) if index >= 0 else 0)
        if state in self.held:
            return False
        self.held.add(state)
        self.writes.append(index)
        return True

    def settle(self) -> None:
        """There is no right to create here."""

    def open(self, view: SweepView) -> bool:
        return self.write(view, OPENING)

    def close(self, view: SweepView) -> None:
        for index in range(len(PLAN.trials)):
            self.write(view, index)
        self.write(view, CLOSING)

    def run(self, status: str = "finished") -> None:
        """Tell of a whole sweep, then write it."""
        self.requests.put(("start", sweep_info(), PLAN, {}))
        for record in make_records(PLAN).values():
            self.requests.put(("record", finished(record)))
        self.requests.put(("finish", status, {}))
        self.writer().write()

    def run_until_told(self) -> None:
        """Tell of a sweep that has begun, then write until it is told to have finished."""
        self.requests.put(("start", sweep_info(), PLAN, make_records(PLAN)))
        self.writer().write()

    def writer(self) -> ViewWriter:
        def read(key: str, name: str) -> Any:
            raise FileNotFoundError(name)

        return ViewWriter(
            self.requests, self.said.append, lambda _: None, read=read, uri="http://me:hunter2@host", experiment="e"
        )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRuns]:
    monkeypatch.setattr(view_writer, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(view_writer, "SETTLING", 0.1)

    def runs(*arguments: Any) -> FakeRuns:
        made = FakeRuns(*arguments)
        monkeypatch.setattr(view_writer, "MlflowRuns", made.connect)
        return made

    return runs


def test_everything_is_written_and_the_parent_is_closed_last(make: Callable[..., FakeRuns]) -> None:
    runs = make()

    runs.run()

    assert runs.writes == EVERYTHING, "what has gathered for a run is written at once"
    assert runs.said == []


def test_an_outage_of_a_thousand_attempts_is_made_up_for(
    make: Callable[..., FakeRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_writer, "LONGEST_PAUSE", 0.0)
    broken = iter([True] * 1100)

    def fault(_: int) -> None:
        if next(broken, False):
            raise ConnectionError("connection refused")

    runs = make(fault)
    threading.Thread(target=runs.run_until_told, daemon=True).start()
    wait_for(lambda: runs.connections > 1050)
    runs.requests.put(("finish", "finished", {}))

    wait_for(lambda: runs.writes == EVERYTHING)


@pytest.mark.slow
def test_a_full_disk_is_given_up_within_a_few_seconds(make: Callable[..., FakeRuns]) -> None:
    def fault(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    runs, begun = make(fault), time.monotonic()
    with pytest.raises(CannotKeep, match=r"is given up \(No space left on device\)"):
        runs.run()

    assert time.monotonic() - begun < 10
    assert len(runs.said) == 1


def test_the_connection_is_made_before_there_is_anything_to_write(make: Callable[..., FakeRuns]) -> None:
    runs = make()
    threading.Thread(target=runs.writer().write, daemon=True).start()

    wait_for(lambda: runs.connections == 1)
    runs.requests.put(("finish", "killed", {}))


def test_an_outage_is_told_once_and_made_up_for(make: Callable[..., FakeRuns]) -> None:
    broken = iter([True] * 5)

    def fault(index: int) -> None:
        if next(broken, False):
            raise ConnectionError("connection refused by https://me:hunter2@host")

    runs = make(fault)
    runs.run()

    assert runs.writes == EVERYTHING
    assert runs.connections == 6
    (told,) = runs.said
    assert "connection refused" in told
    assert "hunter2" not in told


def test_what_stays_away_is_given_up(make: Callable[..., FakeRuns], monkeypatch: pytest.MonkeyPatch) -> None:
    def away(index: int) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(view_writer, "PATIENCE", 0.3)
    runs, begun = make(away), time.monotonic()

    with pytest.raises(CannotKeep, match="given up"):
        runs.run()
    assert time.monotonic() - begun < 3.0


@sampled(2)
@pytest.mark.parametrize("status", ["finished", "killed"])
def test_a_slow_server_is_waited_for_as_long_as_it_moves(
    status: str, make: Callable[..., FakeRuns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(view_writer, "PATIENCE", 0.3)
    runs = make(lambda index: time.sleep(0.1))

    runs.run(status)  # an interrupted sweep too: only its driver does not wait
    assert runs.writes == EVERYTHING


def test_a_run_that_is_refused_does_not_hold_up_the_others(make: Callable[..., FakeRuns]) -> None:
    def fault(index: int) -> None:
        if index == 1:
            raise Refused("param `x` was changed")

    runs = make(fault)

    with pytest.raises(CannotKeep, match="does not take a run of this sweep: param `x` was changed"):
        runs.run()
    assert sorted(runs.writes) == [OPENING, 0, *range(2, len(PLAN.trials))]


def test_a_run_that_is_refused_once_and_then_taken_is_written(make: Callable[..., FakeRuns]) -> None:
    refused = iter([True])

    def fault(index: int) -> None:
        if index == 1 and next(refused, False):
            raise Refused("the run was deleted")

    runs = make(fault)
    runs.run()

    assert set(runs.writes) == set(EVERYTHING)
    assert runs.said == []


def test_events_in_quick_succession_are_written_together(make: Callable[..., FakeRuns]) -> None:
    runs = make()
    writing = threading.Thread(target=runs.writer().write, daemon=True)
    writing.start()
    runs.requests.put(("start", sweep_info(), PLAN, {}))
    wait_for(lambda: runs.writes == EVERYTHING[:-1])
    for record in make_records(PLAN).values():
        runs.requests.put(("record", finished(record)))
    wait_for(lambda: len(runs.writes) == len(EVERYTHING[:-1]) + len(PLAN.trials))
    runs.requests.put(("finish", "finished", {}))
    writing.join(10)

    assert len(runs.writes) == len(EVERYTHING) + len(PLAN.trials)


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sweep_that_never_began_needs_no_view(make: Callable[..., FakeRuns]) -> None:
    runs = make()
    runs.requests.put(("finish", "finished", {}))

    runs.writer().write()

    assert runs.writes == []
