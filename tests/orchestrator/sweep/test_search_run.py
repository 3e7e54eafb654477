"""Sweeps with a search, from the jobs to the results, with stages that only pretend to train."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from factories import make_record
from hydra.core.utils import JobStatus
from searched_plans import crossing
from small_trials import composed

from orchestrator.commands import compare_command
from orchestrator.compare.baseline import make_baseline
from orchestrator.compare.compare_trials import compare_trials
from orchestrator.config.schema import ConfigError
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.events import Decision
from orchestrator.core.file_names import WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Job, Plan
from orchestrator.core.work_order import WorkOrder
from orchestrator.execution.on_ray.ray_executor import executor_of
from orchestrator.store import saved_sweep
from orchestrator.store.store import Store
from orchestrator.sweep import conductor
from orchestrator.sweep.launch import Stopped, _returned
from orchestrator.sweep.outcome import Outcome

BASE = ("schedule=one_shot", "cluster=inline", "tracking=none", "store.uri=memory://searched")
MATCHING = ("search=matching", "compare.margin=0.01")
LOSS = crossing(0.62)
ROOT = Path(__file__).parents[3]


COMMITTED: list[str] = []
"""Keys of the stages that were run, in order."""


class Killed(BaseException):
    """Death of the driver."""


def pretend(order: WorkOrder) -> Iterator[StageRecord]:
    """Commit a record for each stage, whose loss on validation follows from its sparsity and seed."""
    for spec in order.specs:
        record = make_record(Plan({spec.key: spec}, ()), spec.key)
        lost = LOSS("", record.sparsity, spec.fields["seed"]) if spec.kind == "round" else 0.0
        after = {**record.after, "val/accuracy": 0.9 - lost}

        def write(file: BinaryIO) -> None:
            file.write(b"weights")

        COMMITTED.append(spec.key)
        yield order.worker.store.commit(replace(record, after=after, files={}), {WEIGHTS: write})


@pytest.fixture(autouse=True)
def _pretended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    COMMITTED.clear()
    for uri in ("memory://searched", "memory://other"):
        Store(uri).backend.remove_folder("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(conductor, "executor_of", lambda cluster: partial(executor_of(cluster), work=pretend))
    monkeypatch.setattr(conductor, "preflight", lambda *_, **__: ())
    monkeypatch.setattr("orchestrator.views.report.report_files.report", lambda *_: {})


def jobs(*overrides: str, seeds: int = 8, sparsities: tuple[float, ...] = (0.3, 0.5, 0.6, 0.7, 0.9)) -> list[Job]:
    """Return the jobs of a grid."""
    each = [(f"schedule.sparsity={sparsity}", f"seed={seed}") for sparsity in sparsities for seed in range(seeds)]
    config = composed(*BASE, *overrides)
    return [Job(words, _with(config, *words)) for words in each]


def _with(config: Mapping[str, Any], sparsity: str, seed: str) -> dict[str, Any]:
    schedule = {**config["schedule"], "sparsity": float(sparsity.partition("=")[2])}
    return {**config, "schedule": schedule, "seed": int(seed.partition("=")[2])}


def saved() -> saved_sweep.SavedSweep:
    store = Store("memory://searched")
    return saved_sweep.load(store, saved_sweep.chosen_sweep(store, None))


@pytest.mark.slow
def test_a_search_runs_what_it_asks_for_and_says_what_it_has_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = conductor.run(jobs(*MATCHING))
    told, sweep = capsys.readouterr().out, saved()

    assert outcome.status == "finished"
    assert outcome.incomplete() is None
    assert sweep.search == outcome.decision
    assert sweep.search is not None
    assert sweep.search.ended
    assert "The search runs" in told
    assert "Search: explore l1_unstructured at 60.00%: " in told
    assert "Answer: l1_unstructured: 60.00% matches dense: a loss of 1.00 points" in told
    assert f", {len(sweep.search.stopped)} stopped by the search" in told
    assert sweep.records.keys() == outcome.records.keys() < outcome.plan.stages.keys()
    assert sweep.settled(sweep.records)
    comparison = compare_trials(outcome.plan, outcome.records, {}, search=outcome.decision)
    with pytest.raises(OrchestratorError, match="run the sweep again, with search=none, as its search stopped trials"):
        make_baseline(sweep.info, comparison, outcome.plan, outcome.records)


def test_a_job_that_was_not_run_returns_the_reason() -> None:
    work = jobs(*MATCHING)
    outcome = conductor.run(work)
    results = [_returned(job, outcome, index, None) for index, job in enumerate(work)]
    stopped = [result for result in results if isinstance(result.return_value, Stopped)]

    assert {result.status for result in results} == {JobStatus.COMPLETED}
    assert outcome.decision is not None
    assert len(stopped) == len(outcome.decision.stopped)
    assert stopped[-1].return_value != stopped[-1].return_value, "it is nan for a sweeper"
    assert "ended at l1_unstructured at 70.00%" in repr(stopped[-1].return_value)


def test_the_same_command_again_runs_nothing_and_concludes_the_same() -> None:
    first = conductor.run(jobs(*MATCHING)).decision
    before = len(COMMITTED)
    second = conductor.run(jobs(*MATCHING))

    assert second.decision == first
    assert before == len(second.records) == len(COMMITTED)


def test_a_search_that_is_turned_off_goes_on_and_comes_back_with_its_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = conductor.run(jobs(*MATCHING))
    grid = conductor.run(jobs(*MATCHING, "search=none"))
    again = conductor.run(jobs(*MATCHING))

    assert grid.decision is None
    assert grid.status == "finished"
    assert len(COMMITTED) == len({*COMMITTED}) == len(grid.plan.stages), "each stage was run once"
    assert again.decision is not None
    assert first.decision is not None
    assert (again.decision.looks, again.decision.answers) == (first.decision.looks, first.decision.answers)
    assert compare_command.main([*Store("memory://searched").sweeps(), "--store", "memory://searched"]) == 0
    assert "The search beside the whole grid, by the same rule on validation, for " in capsys.readouterr().out


@pytest.mark.slow
def test_a_search_is_set_beside_a_grid_of_another_store_but_not_beside_a_strange_sweep(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conductor.run(jobs(*MATCHING))
    conductor.run(jobs(*MATCHING, "search=none", "store.uri=memory://other", "name=grid"))
    conductor.run(jobs("method=random", "store.uri=memory://other", "name=strange", sparsities=(0.3,)))
    (searched,), others = Store("memory://searched").sweeps(), Store("memory://other").sweeps()
    stores = ("--store", "memory://searched", "--other-store", "memory://other")
    told = {}
    for other in others:
        capsys.readouterr()
        assert compare_command.main([searched, other, *stores]) == 0
        told[other.partition("-")[0]] = "beside the whole grid" in capsys.readouterr().out

    assert told == {"grid": True, "strange": False}


@pytest.mark.slow
def test_a_wider_search_keeps_all_work_and_confirms_with_seeds_that_no_search_has_seen() -> None:
    first = conductor.run(jobs(*MATCHING))
    with pytest.raises(ConfigError, match="has 1 values for l1_unstructured that could confirm"):
        conductor.run(jobs(*MATCHING, seeds=9))
    wide = conductor.run(jobs(*MATCHING, seeds=12))
    assert wide.decision is not None
    confirmed = {
        wide.plan.stages[key].fields["seed"] for look in wide.decision.looks if look.confirms for key in look.asked
    }

    assert confirmed == {8, 9, 10, 11}
    assert first.records.keys() & wide.decision.run == set()
    assert conductor.run(jobs(*MATCHING)).decision == first.decision, "the narrow search stands as it was"


@pytest.mark.slow
def test_each_decision_is_saved_before_its_stages_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Decision | None] = []

    def watching(order: WorkOrder) -> Iterator[StageRecord]:
        store = Store("memory://searched")
        search = saved_sweep.read(store, store.sweeps()[0]).search
        found.append(search)
        assert search is not None
        assert {spec.key for spec in order.specs} <= {*search.run}
        yield from pretend(order)

    monkeypatch.setattr(conductor, "executor_of", lambda cluster: partial(executor_of(cluster), work=watching))
    outcome = conductor.run(jobs(*MATCHING))

    assert outcome.status == "finished"
    assert found


@pytest.mark.slow
def test_a_killed_driver_changes_no_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is killed after 1 stage, then in the midst of two looks and at the end."""
    left = [0]

    def dying(order: WorkOrder) -> Iterator[StageRecord]:
        for record in pretend(order):
            yield record
            left[0] -= 1
            if left[0] == 0:
                raise Killed

    plain = conductor.run(jobs(*MATCHING, "store.uri=memory://other"))
    monkeypatch.setattr(conductor, "executor_of", lambda cluster: partial(executor_of(cluster), work=dying))
    for after in (1, 8, 6, 7):
        left[0] = after
        with pytest.raises(Killed):
            conductor.run(jobs(*MATCHING))
    again = conductor.run(jobs(*MATCHING))

    assert again.decision == plain.decision
    assert again.records.keys() == plain.records.keys()


def test_a_dry_run_tells_the_whole_grid_and_the_least_and_most_of_the_search(
    capsys: pytest.CaptureFixture[str],
) -> None:
    conductor.run(jobs(*MATCHING, "dry_run=true"))
    told = capsys.readouterr().out

    assert "stages    48 unique" in told
    assert "search    at least 19 stages, 19 stages to run" in told
    assert "at most 42 stages" in told
    assert not Store("memory://searched").sweeps()


def test_a_search_that_differs_between_trials_is_refused() -> None:
    mixed = [*jobs(*MATCHING)[:8], *jobs("search=none")[8:]]

    with pytest.raises(ConfigError, match="`search` differs between trials"):
        conductor.run(mixed)


def test_an_outcome_waits_for_trials_that_failed_in_passing() -> None:
    outcome = conductor.run(jobs(*MATCHING))
    key = outcome.plan.trials[0].stages[1]
    waiting = Outcome(outcome.plan, {}, {key: "the node was lost"}, decision=Decision(run=(key,)))

    assert waiting.status == "failed"
    assert "1 of 40 trials failed: sparsity=0.3 seed=0\nThe search waits for them." in str(waiting.incomplete())


KILLED = {
    "matching": ("search=matching", "schedule.sparsity=0.5,0.7,0.9"),
    "frontier": ("search=frontier", "schedule.sparsity=0.5,0.7,0.9"),
    "training": ("search=halving", "search.rungs=training", "method=l1_unstructured,random_unstructured,lamp"),
}


@pytest.mark.slow  # kills whole processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("search", "workers"),
    [
        ("matching", 2),
        ("training", 2),
        *(
            pytest.param(*each, marks=pytest.mark.many)
            for each in (("matching", 1), ("frontier", 1), ("frontier", 2), ("training", 1))
        ),
    ],
)
def test_killed_processes_change_no_decision(
    search: str, workers: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    kills = max(1, int(request.config.getoption("--chaos", 10)) // 4)
    words = [
        *(
            "-m",
            *KILLED[search],
            "seed=range(6)",
            "schedule=one_shot",
            "compare.margin=0.03",
            "model=mlp",
            "model.hidden=[16]",
        ),
        *("train.epochs=2", "finetune.epochs=4"),
        *("tracking=none", f"cluster.num_cpus={workers}"),
    ]

    def start(folder: Path) -> subprocess.Popen[bytes]:
        folder.mkdir(exist_ok=True)
        paths = os.pathsep.join([str(ROOT / "tests" / "without_figures"), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "orchestrator", *words]
        return subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)

    def decision(folder: Path) -> Decision | None:
        store = Store(str(folder / "store"))
        return saved_sweep.read(store, store.sweeps()[0]).search

    assert start(tmp_path / "plain").wait(280) == 0
    killed = tmp_path / "killed"
    for moment in range(kills):
        process = start(killed)
        goal = len([*killed.glob("store/stages/*/record.json")]) + 1 + moment % 3
        while process.poll() is None and len([*killed.glob("store/stages/*/record.json")]) < goal:
            time.sleep(0.02)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert start(killed).wait(280) == 0

    assert decision(killed) == decision(tmp_path / "plain")
