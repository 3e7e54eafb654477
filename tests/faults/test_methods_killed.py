"""Workers and drivers are killed while methods score and train; masks, weights, metrics and records stay the same."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fault_commands import Command, plan_of, records_of, results_of

from orchestrator.store.store import Store

METHODS = (
    *("snip", "iterative_snip", "force", "grasp", "synflow", "taylor", "fisher", "obd", "obs", "wanda", "fpgm"),
    *("slimming", "n_m", "lamp", "lottery_ticket", "lr_rewinding"),
)
SWEEP = (
    *("-m", f"method={','.join(METHODS)}", "schedule.sparsity=0.5", "prune.exclude=[conv1.*]", "name=methods"),
    *("model=cnn", "model.channels=[4,8]", "tracking=none", "train.epochs=null", "train.steps=12"),
    *("finetune.epochs=null", "finetune.steps=4"),
    *("+train.loss._target_=held.CrossEntropy", "+finetune.loss._target_=held.CrossEntropy"),
)


def killed(command: Command, moment: str, *, driver: bool = False) -> None:
    """Kill the worker that waits at a moment, or the driver with all its workers."""
    file = command.folder / "held" / moment
    command.until(lambda: file.exists() and file.read_text(), timeout=240)
    for pid in (command.process.pid, *command.processes()) if driver else (int(file.read_text()),):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def weights_of(folder: Path) -> dict[str, bytes]:
    """Return the stored weights of each trial's last stage."""
    store = Store(str(folder / "store"))
    return {trial.name: store.read(trial.stages[-1], "weights.safetensors") for trial in plan_of(folder).trials}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_methods_give_the_same_bits_over_workers_kills_and_resumes(
    start: Callable[..., Command], tmp_path: Path
) -> None:
    quiet = start(tmp_path / "quiet", *SWEEP, "cluster=inline")
    assert quiet.wait(300) == 0, quiet.stderr

    folder = tmp_path / "killed"
    (folder / "held").mkdir(parents=True)
    one = start(folder, *SWEEP, "cluster.num_cpus=1", HOLD="taylor:0,obs:1", HELD=str(folder / "held"))
    killed(one, "taylor:0")
    killed(one, "obs:1", driver=True)
    one.wait(30)
    before = len(records_of(folder))
    two = start(folder, *SWEEP, "cluster.num_cpus=2", HOLD="synflow:50,grasp:0,training:30", HELD=str(folder / "held"))
    for moment in ("training:30", "grasp:0", "synflow:50"):
        killed(two, moment)
    assert two.wait(300) == 0, two.stderr

    found = records_of(folder)
    assert 0 < before < len(found) == len(plan_of(folder).stages)
    assert max(record.attempt for record in found.values()) > 1
    assert sorted(record.kind for record in found.values() if not record.round) == ["dense", "start"]
    assert all(record.details["scoring"] for record in found.values() if record.round)
    assert results_of(folder) == results_of(tmp_path / "quiet")
    assert weights_of(folder) == weights_of(tmp_path / "quiet")
