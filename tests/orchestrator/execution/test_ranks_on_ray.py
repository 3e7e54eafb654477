"""Trials of several processes on Ray: equal bits, also after the death of any of their processes, and none is left."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from own_rank_cases import shown
from rank_kills import Trial, disturbed, quiet

from orchestrator.store.store import Store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # several starts of Ray each


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], float]:
    """Results of a quiet run, and the seconds for which its rank 1 worked."""
    trial = Trial(tmp_path_factory.mktemp("quiet"))
    span = quiet(trial)
    return trial.results(), span


@pytest.fixture(scope="module")
def expected(undisturbed: tuple[dict[str, Any], float]) -> dict[str, Any]:
    """Results of a quiet run."""
    return undisturbed[0]


def test_the_same_sweep_again_has_the_same_bits(expected: dict[str, Any], tmp_path: Path) -> None:
    trial = Trial(tmp_path).start()

    assert trial.wait() == 0, trial.output
    assert trial.results() == expected
    assert len(expected) == 2


@pytest.mark.parametrize("kinds", [("rank 1", "driver"), ("rank 0", "all ranks")], ids=" and ".join)
def test_a_killed_process_costs_one_attempt_and_no_bit_and_leaves_none(
    kinds: tuple[str, ...],
    undisturbed: tuple[dict[str, Any], float],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    results, span = undisturbed
    draws = random.Random(str(kinds))
    for number in range(max(1, int(request.config.getoption("--chaos", 10)) // 10)):
        trial = Trial(tmp_path / str(number))
        losses = disturbed(trial, kinds, span / 3, draws)

        assert [loss.kind for loss in losses] == [*kinds]
        assert not any(loss.late for loss in losses), losses
        assert trial.driver.returncode == 0, trial.output
        assert trial.retries == len(set(kinds) - {"driver"})
        assert trial.results() == results


def test_an_interrupt_ends_all_processes_at_one_step_with_a_checkpoint(
    expected: dict[str, Any], tmp_path: Path
) -> None:
    trial = Trial(tmp_path).start()
    checkpoints = Store(str(tmp_path / "store")).checkpoints
    trial.until(lambda: checkpoints.known() or trial.driver.poll() is not None)
    trial.driver.send_signal(signal.SIGINT)

    assert trial.wait(60) == 130
    assert not trial.processes()
    assert checkpoints.known()
    assert trial.start().wait() == 0
    assert trial.results() == expected


def test_a_rank_that_hangs_is_found_and_told(expected: dict[str, Any], tmp_path: Path) -> None:
    trial = Trial(tmp_path).start("cluster.stage_timeout=30")
    trial.until_ranks()
    time.sleep(2.0)
    for process in trial.processes("rank 1"):
        os.kill(process, signal.SIGSTOP)

    assert trial.wait() == 0, trial.output
    assert "rank 0 lost rank 1 of the trial" in trial.output or "it hung, and took longer than" in trial.output
    assert trial.results() == expected


def test_a_stage_beyond_its_time_is_tried_again_from_its_checkpoint(tmp_path: Path) -> None:
    trial = Trial(tmp_path).start("cluster.stage_timeout=6", "train.epochs=3000")
    trial.until(lambda: trial.retries or trial.driver.poll() is not None)
    os.kill(trial.driver.pid, signal.SIGINT)
    trial.wait()

    assert "retried   dense, seed 0  TimeoutError: the stage took longer than `cluster.stage_timeout`" in trial.output
    assert "attempt 2, from step" in trial.output
    assert "Cancelled" not in trial.output


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
    trials = [Trial(tmp_path / name) for name in ("first", "second")]
    for trial in trials:
        (trial.folder / "mine.py").write_text(shown("several-processes.md", "several") + NOTED)
        own = ("train._target_=mine.noted", "finetune._target_=mine.noted", "train.epochs=3", "model.dropout=0")
        assert trial.start(*own).wait() == 0, trial.output

    assert trials[0].results() == trials[1].results()
    assert len(trials[0].results()) == 2
    calls = {tuple(line.split(" ", 1)) for line in (trials[0].folder / "processes").read_text().splitlines()}
    assert sorted(role for _, role in calls)[-2:] == ["0 of 2", "1 of 2"]
    assert len({process for process, _ in calls}) == len(calls), "no process had two roles, one of them the preflight's"
