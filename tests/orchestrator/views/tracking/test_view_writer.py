from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from factories import finished, make_plan, make_records, sweep_info

from orchestrator.views.tracking import view_writer
from orchestrator.views.tracking.run_contents import SweepView
from orchestrator.views.tracking.view_writer import CLOSING, OPENING, ViewWriter

PLAN = make_plan(methods=("l1_unstructured",), seeds=(0, 1))
EVERYTHING = {OPENING, CLOSING, *range(len(PLAN.trials))}


class Refused(Exception):
    """What a keeper says that will never take a run."""


class FakeKeeper:
    """Keeps the indices that were written; `fault(index)` may raise."""

    def __init__(self, fault: Callable[[int], None] = lambda index: None) -> None:
        self.fault = fault
        self.held: set[tuple[int, int]] = set()
        self.writes: list[int] = []
        self.connections = 0
        self.warnings: list[str] = []

    def connect(self) -> FakeKeeper:
        self.connections += 1
        return self

    def write(self, view: SweepView, index: int) -> bool:
        self.fault(index)
        stages = len(view.chain(index)) if index >= 0 else 0
        fresh = (index, stages) not in self.held
        self.held.add((index, stages))
        if fresh:
            self.writes.append(index)
        return fresh

    def writer(self) -> ViewWriter:
        refused = lambda error: isinstance(error, Refused)  # noqa: E731
        return ViewWriter(self.connect, refused, self.warnings.append, "the keeper")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_writer, "LONGEST_PAUSE", 0.01)


def run(writer: ViewWriter, patience: float = 10.0) -> bool:
    view = SweepView(sweep_info(), PLAN, {})
    writer.open(view)
    for record in make_records(PLAN).values():
        writer.take(finished(record))
    view.close("FINISHED", {})
    return writer.close(patience)


def test_everything_is_written_and_the_parent_is_closed_last() -> None:
    keeper = FakeKeeper()

    assert run(keeper.writer())
    assert set(keeper.writes) == EVERYTHING
    assert keeper.writes[-1] == CLOSING
    assert keeper.warnings == []


def test_what_gathers_for_a_run_is_written_at_once() -> None:
    gate = threading.Event()
    keeper = FakeKeeper(lambda index: gate.wait(10) and None)
    writer = keeper.writer()
    view = SweepView(sweep_info(), PLAN, {})
    writer.open(view)
    begun = time.monotonic()
    for record in make_records(PLAN).values():
        writer.take(finished(record))
    assert time.monotonic() - begun < 1.0, "taking an event waits for the keeper"
    gate.set()
    view.close("FINISHED", {})

    assert writer.close(10)
    assert len(keeper.writes) == len(EVERYTHING)


def test_an_outage_is_told_once_and_made_up_for() -> None:
    broken = iter([True] * 5)

    def fault(index: int) -> None:
        if next(broken, False):
            raise ConnectionError("connection refused by https://me:hunter2@host")

    keeper = FakeKeeper(fault)

    assert run(keeper.writer())
    assert set(keeper.writes) == EVERYTHING
    assert keeper.connections == 6
    (warning,) = keeper.warnings
    assert "connection refused" in warning
    assert "hunter2" not in warning


def test_a_keeper_that_stays_away_is_given_up() -> None:
    def away(index: int) -> None:
        raise ConnectionError("nobody there")

    keeper = FakeKeeper(away)
    begun = time.monotonic()

    assert not run(keeper.writer(), patience=0.3)
    assert time.monotonic() - begun < 3.0


def test_a_keeper_that_hangs_is_given_up() -> None:
    keeper = FakeKeeper(lambda index: time.sleep(5))
    begun = time.monotonic()

    assert not run(keeper.writer(), patience=0.3)
    assert time.monotonic() - begun < 3.0


def test_a_slow_keeper_is_waited_for_as_long_as_it_moves() -> None:
    keeper = FakeKeeper(lambda index: time.sleep(0.15))

    assert run(keeper.writer(), patience=0.5)
    assert set(keeper.writes) == EVERYTHING


def test_an_interrupted_sweep_does_not_wait_for_a_slow_keeper() -> None:
    writer = FakeKeeper(lambda index: time.sleep(0.15)).writer()
    writer.open(SweepView(sweep_info(), PLAN, {}))
    begun = time.monotonic()

    assert not writer.close(patience=10, limit=0.3)
    assert time.monotonic() - begun < 2.0


def test_a_run_that_is_refused_does_not_hold_up_the_others() -> None:
    def fault(index: int) -> None:
        if index == 1:
            raise Refused("param `x` was changed")

    keeper = FakeKeeper(fault)

    assert not run(keeper.writer())
    assert set(keeper.writes) == EVERYTHING - {1}
    (warning,) = keeper.warnings
    assert "param `x` was changed" in warning


def test_a_run_that_is_refused_once_and_then_taken_is_written() -> None:
    refused = iter([True])

    def fault(index: int) -> None:
        if index == 1 and next(refused, False):
            raise Refused("the run was deleted")

    keeper = FakeKeeper(fault)

    assert run(keeper.writer())
    assert set(keeper.writes) == EVERYTHING
    assert keeper.warnings == []


def test_events_in_quick_succession_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_writer, "SETTLING", 0.3)
    keeper = FakeKeeper()
    writer = keeper.writer()
    view = SweepView(sweep_info(), PLAN, {})
    writer.open(view)
    wait_for(lambda: len(keeper.writes) == len(EVERYTHING) - 1)
    for record in make_records(PLAN).values():
        writer.take(finished(record))
    wait_for(lambda: len(keeper.writes) == len(EVERYTHING) - 1 + len(PLAN.trials))
    view.close("FINISHED", {})

    assert writer.close(10)
    assert len(keeper.writes) == len(EVERYTHING) + len(PLAN.trials)


def wait_for(true: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_sweep_whose_parent_is_refused_is_not_tracked() -> None:
    def fault(index: int) -> None:
        raise Refused("no such experiment")

    keeper = FakeKeeper(fault)

    assert not run(keeper.writer())
    assert keeper.writes == []
    assert len(keeper.warnings) == 1


def test_a_sweep_that_never_began_needs_no_view() -> None:
    assert FakeKeeper().writer().close(5)
