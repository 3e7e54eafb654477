"""Workers, drivers and trackers are killed at random; the same command still gives the results of a quiet sweep."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from fault_commands import SWEEP, Command, results_of, trainings
from view import assert_complete, runs_in

CHAOTIC = (*SWEEP, "train.epochs=120", "finetune.epochs=120", "train.eval_every=1200", "finetune.eval_every=1200")
STAGES = 10


@dataclass
class Kills:
    """Processes that were killed so far."""

    workers: int = 0
    drivers: int = 0
    trackers: int = 0

    @property
    def total(self) -> int:
        return self.workers + self.drivers + self.trackers

    @property
    def lost(self) -> int:
        """Maximum number of stages that had to start again; the death of a driver ends its two workers, too."""
        return self.workers + 2 * self.drivers


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_killing_at_random_changes_nothing(
    start: Callable[..., Command], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    wanted, rng, total, sweeps = int(request.config.getoption("--chaos", 10)), random.Random(0), 0, 0
    quiet = start(tmp_path / "quiet", *CHAOTIC, "cluster=inline", "tracking=none")
    assert quiet.wait() == 0, quiet.stderr
    while total < wanted:
        sweeps += 1
        assert sweeps <= wanted + 3, "sweeps end before anything in them can be killed"
        folder, kills = tmp_path / f"sweep-{sweeps}", Kills()
        commands = [disturbed(start(folder, *CHAOTIC, "cluster.num_cpus=2"), rng, kills, wanted - total)]
        while commands[-1].process.returncode != 0:
            if commands[-1].process.returncode == 3:
                assert "python -m orchestrator.sync faulty-" in commands[-1].stderr.splitlines()[-1]
            commands.append(disturbed(start(folder, *CHAOTIC, "cluster.num_cpus=2"), rng, kills, wanted - total))
        total += kills.total

        assert results_of(folder) == results_of(tmp_path / "quiet")
        assert STAGES <= trainings(folder) <= STAGES + kills.lost
        assert_complete(folder, runs_in(folder / "mlflow.db"))
        for command in commands:
            assert "Traceback" not in command.stderr
            command.leaves_nothing()
        assert len(commands) < wanted + 10


def disturbed(command: Command, rng: random.Random, kills: Kills, most: int) -> Command:
    """Kill workers, trackers, and perhaps the driver, while a command runs; return the command once it has ended."""
    driver_dies = rng.random() < 0.5
    while command.process.poll() is None:
        with suppress(TimeoutError, AssertionError):
            command.until(lambda: False, timeout=rng.uniform(0.2, 2.5))
        workers, trackers = command.processes("ray::segment"), command.processes("orchestrator.views.tracking")
        if kills.total >= most or not workers + trackers or command.process.poll() is not None:
            continue
        if driver_dies and rng.random() < 0.4:
            command.send(signal.SIGKILL)
            kills.drivers += 1
            continue
        victim = rng.choice(sorted(workers) if workers and rng.random() < 0.6 else sorted(trackers or workers))
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
            kills.workers += victim in workers
            kills.trackers += victim in trackers
    command.wait()
    assert command.process.returncode in (0, 1, 3, -signal.SIGKILL), command.stderr
    return command
