"""A command that is interrupted, or killed with all its workers, within a long stage continues from a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fault_commands import Command, records_of, results_of

from orchestrator.store.store import Store

LONG = (
    *(
        "model=cnn",
        "train.epochs=75",
        "finetune.epochs=1",
        "schedule=one_shot",
        "schedule.sparsity=0.5",
        "name=faulty",
    ),
    *("tracking=none", "cluster.num_cpus=1"),
)
"""A dense training of half a minute on a busy machine, and a round."""


def key_of(folder: Path) -> str:
    """Return the key of the stage that has a checkpoint; "" if none has."""
    known = Store(str(folder / "store")).checkpoints.known()
    return known[0] if known else ""


def reached(folder: Path) -> int:
    """Return the step of the only checkpoint."""
    return Store(str(folder / "store")).checkpoints.reached(key).number if (key := key_of(folder)) else -1


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """Folder of a sweep that ran in one process without faults, and the seconds of its dense training."""
    folder = tmp_path_factory.mktemp("quiet") / "sweep"
    command = Command(folder, *LONG, "cluster=inline")
    assert command.wait(300) == 0, command.stderr
    return folder, max(record.seconds for record in records_of(folder).values())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cluster", ["inline", "local"])
def test_an_interrupted_stage_writes_a_checkpoint_and_goes_on_from_it(
    start: Callable[..., Command], tmp_path: Path, quiet: tuple[Path, float], cluster: str
) -> None:
    folder = tmp_path / "sweep"
    command = start(folder, *LONG, f"cluster={cluster}")
    command.until(lambda: "started" in command.stdout, timeout=120)
    time.sleep(quiet[1] / 2)
    command.send(signal.SIGINT, group=True)

    assert command.wait(30) == 130
    assert (step := reached(folder)) > 0
    assert (
        f"Interrupted; what finished is kept, and a checkpoint of 1 stage (at step {step}): the same" in command.stderr
    )
    again = start(folder, *LONG, f"cluster={cluster}")
    assert again.wait(300) == 0
    assert f"Resumed from checkpoints: dense, seed 0 from step {step}." in again.stdout
    assert results_of(folder) == results_of(quiet[0])
    assert not key_of(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_driver_killed_with_its_workers_at_65_percent_leaves_less_than_half(
    start: Callable[..., Command], tmp_path: Path, quiet: tuple[Path, float]
) -> None:
    folder, often = tmp_path / "sweep", ("train.checkpoint_minutes=0.03",)
    command = start(folder, *LONG, *often)
    steps = max(record.steps for record in records_of(quiet[0]).values())
    command.until(lambda: reached(folder) > 0.65 * steps, timeout=300)
    for pid in (command.process.pid, *command.processes()):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    command.process.wait(30)
    again = start(folder, *LONG, *often)

    assert again.wait(300) == 0, again.stderr
    assert results_of(folder) == results_of(quiet[0])
    begun, ended = (_shown(again.stdout, what) for what in ("started ", "finished"))
    print(f"undisturbed {quiet[1]:.1f} s; from the checkpoint to the end {ended - begun} s")
    assert ended - begun < 0.5 * quiet[1] + 2, "what was done before is not done again"


def _shown(output: str, what: str) -> int:
    """Return the second at which the dense training `what`, parsed from a line like `0:12  started   dense, seed 0`."""
    minutes, seconds = re.search(rf"(\d+):(\d+)  {what} +dense", output).groups()  # type: ignore[union-attr]
    return 60 * int(minutes) + int(seconds)
