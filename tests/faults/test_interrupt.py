"""Ctrl-C and SIGTERM end a sweep in seconds, report and keep its state, and leave no process behind."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_commands import SWEEP, Command, finished_stages, results_of
from sampling import sampled

Start = Callable[..., Command]
SLOW_FINETUNING = (*SWEEP, "finetune.epochs=3000", "finetune.eval_every=100000")
SECONDS = 20
"""Seconds for a sweep to end on a busy machine; a quiet one takes two or three."""


@pytest.fixture
def short() -> Iterator[Path]:
    """Temporary directory with a short name, as Ray's sockets lie below it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="rt") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_an_interrupted_sweep_says_so_and_resumes_to_the_same_bits(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    folder = tmp_path / "sweep"
    first = start(folder, *SWEEP, "cluster=inline", "tracking=none")
    first.until_stages(2)
    first.send(signal.SIGINT)

    assert first.wait(SECONDS) == 130
    assert "Stopping at the next batch" in first.stderr
    assert "the same command runs the rest" in first.stderr
    assert "Traceback" not in first.stderr
    assert finished_stages(folder) < 10
    assert start(folder, *SWEEP, "cluster=inline", "tracking=none").wait() == 0
    assert results_of(folder) == results_of(undisturbed)


@sampled(2)
@pytest.mark.parametrize("seconds", [0.1, 0.4, 1.0])
def test_an_interrupt_during_the_start_ends_without_a_traceback(start: Start, tmp_path: Path, seconds: float) -> None:
    command = start(tmp_path / "sweep", *SWEEP)
    with pytest.raises(TimeoutError):
        command.until(lambda: False, timeout=seconds)
    command.send(signal.SIGINT, group=True)

    assert command.wait(SECONDS) == 130 or seconds == 0.1, "Python itself was still starting"
    assert "Traceback" not in command.stderr or seconds == 0.1
    command.leaves_nothing()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "group"),
    [
        pytest.param(signal.SIGINT, True, id="ctrl-c"),
        pytest.param(signal.SIGTERM, False, id="sigterm"),
        pytest.param(signal.SIGTERM, True, id="sigterm to all", marks=pytest.mark.many),
        pytest.param(signal.SIGHUP, True, id="closed terminal", marks=pytest.mark.many),
    ],
)
def test_ray_and_mlflow_are_ended_in_order(start: Start, tmp_path: Path, number: signal.Signals, group: bool) -> None:
    folder = tmp_path / "sweep"
    command = start(folder, *SLOW_FINETUNING, "cluster.num_cpus=2")
    command.until_stages(2)
    command.send(number, group=group)

    assert command.wait(SECONDS) == 130
    assert "Traceback" not in command.stderr
    command.leaves_nothing()
    assert set(statuses(folder)) == {"KILLED"}
    assert len(statuses(folder)) == 5


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(start: Start, tmp_path: Path, short: Path) -> None:
    command = start(tmp_path / "sweep", *SLOW_FINETUNING, "cluster.num_cpus=2", "tracking=none", TMPDIR=str(short))
    command.until_stages(1)
    command.send(signal.SIGINT, group=True)
    with pytest.raises(TimeoutError):
        command.until(lambda: False, timeout=0.2)
    command.send(signal.SIGINT, group=True)

    assert command.wait(5) == 130
    command.leaves_nothing(within=2)
    assert not [*short.glob("pruning-ray-*")]


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [pytest.param(2.0, marks=pytest.mark.many), 4.0])
def test_an_interrupt_while_ray_starts_leaves_nothing_behind(start: Start, tmp_path: Path, seconds: float) -> None:
    command = start(tmp_path / "sweep", *SLOW_FINETUNING, "cluster.num_cpus=2")
    with pytest.raises(TimeoutError):
        command.until(lambda: False, timeout=seconds)
    command.send(signal.SIGTERM)

    assert command.wait(SECONDS) == 130
    assert "Traceback" not in command.stderr
    command.leaves_nothing()


def statuses(folder: Path) -> list[str]:
    """Return the status of every run in the folder's MLflow database."""
    import sqlite3

    with sqlite3.connect(folder / "mlflow.db") as database:
        return [status for (status,) in database.execute("select status from runs")]
