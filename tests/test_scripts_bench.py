"""The benchmarks run, and what they race and measure is what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import pruning
from orchestrator.core.records import StageRecord
from orchestrator.store.store import Store
from orchestrator.workloads import data_loading, model_building
from scripts.benchmarks import bench_dynamics, bench_scale
from scripts.benchmarks.simulated import SimulatedExecutor, SimulatedTasks
from scripts.benchmarks.sleeping import plan_jobs
from scripts.peers import digits, race
from scripts.peers.peer_trial import Lengths, run_trial

ROOT = Path(__file__).parent.parent
NOLOAD = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")  # MLflow's own


@pytest.mark.slow
def test_a_sweep_of_sleeps_is_planned_run_shown_and_logged(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "benchmarks" / "bench_sweep.py"), "--trials", "20", "--cpus", "2"]
    command += ["--shortest", "0.01", "--longest", "0.01", "--json", "found.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HOME": str(tmp_path)}

    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    (found,) = json.loads((tmp_path / "found.json").read_text())
    assert found["ideal"] == pytest.approx(0.1)
    assert found["time"] > found["ideal"]
    assert found["efficiency"] == pytest.approx(found["ideal"] / found["time"])
    assert found["logging_ms_per_trial"] > 0


@pytest.mark.slow
def test_simulated_nodes_run_each_stage_once_on_their_slots(tmp_path: Path) -> None:
    plan = plan_jobs([f"seed={index % 4}", f"schedule.sparsity={0.5 + index / 100}"] for index in range(24))
    store, tasks = Store(str(tmp_path / "store")), SimulatedTasks(nodes=3, slots=2, seconds=10.0)
    running, most, records = set[str](), 0, dict[str, StageRecord]()
    with store.leases() as leases:
        for event in SimulatedExecutor(store, tasks, 3, 2, claims=leases).run(plan):
            running.add(event.key)
            most = max(most, len(running))
            if event.record is not None:
                running.remove(event.key)
                records[event.key] = event.record

    assert records.keys() == plan.stages.keys()
    assert most == 6
    assert tasks.busy_at is not None
    work = sum(record.seconds for record in records.values())
    assert work / 6 < tasks.now - tasks.began < work


@pytest.mark.slow
def test_a_simulated_sweep_is_shown_tracked_compared_and_saved(tmp_path: Path) -> None:
    arguments = ["--trials", "40", "80", "--seeds", "2", "--nodes", "5", "--json", str(tmp_path / "found.json")]
    bench_scale.main(arguments)

    found = json.loads((tmp_path / "found.json").read_text())
    assert [(each["trials"], each["stages"], each["points"]) for each in found] == [(40, 42, 20), (80, 82, 40)]
    assert all(each["driver"] > 0 and each["view"] > 0 and each["saved_mb"] > 0 for each in found)


def test_peers_train_the_network_on_the_split_that_we_do() -> None:
    ours = data_loading.load({"kind": "digits"})
    for split, (images, labels) in zip((ours.train, ours.val, ours.test), digits.load_splits(), strict=True):
        (theirs,) = split.batches(len(labels), device=torch.device("cpu"))
        torch.testing.assert_close(images, theirs[0].flatten(1))
        assert torch.equal(labels, theirs[1])

    network = model_building.build(
        {"kind": "mlp"} | {"input_shape": None, "classes": None},
        input_shape=ours.input_shape,
        classes=ours.classes,
        seed=0,
    )
    assert isinstance(network, nn.Sequential)
    shapes = [parameter.shape for parameter in network.parameters()]
    assert [parameter.shape for parameter in digits.mlp().parameters()] == shapes
    kinds = [type(module) for module in network if not isinstance(module, nn.Flatten)]
    assert [type(module) for module in digits.mlp()] == kinds


def test_peers_prune_to_the_sparsity_asked_for_and_fine_tune() -> None:
    reported: list[int] = []

    metrics = run_trial(0.9, Lengths(60, 24, 12), lambda _, step: reported.append(step))

    assert metrics["sparsity/overall"] == pytest.approx(0.9, abs=1e-4)
    assert metrics["val/accuracy"] > metrics["val/accuracy_before"]
    assert metrics["test/accuracy"] > 0.8
    assert reported == [12, 24, 36, 48, 60, 60, 72, 84]


def test_a_trial_is_as_long_as_asked_for_in_the_proportion_of_the_presets() -> None:
    lengths = race.lengths_for(2.1, step=0.001)

    assert lengths == Lengths(1500, 600, 100)
    assert race.lengths_for(0.0, step=1.0) == Lengths(15, 6, 1)


@pytest.mark.slow
@NOLOAD
def test_a_failure_is_not_measured() -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        race.run("a way", [sys.executable, "-c", "raise SystemExit(3)"])
    with pytest.raises(SystemExit, match=r"MLflow holds sparsities \[\]"):
        race.run("a way", [sys.executable, "-c", ""])


def test_what_the_extra_would_install_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(race, "EXTRA", dict.fromkeys(race.EXTRA, "no_such.module"))

    assert list(race.ways_here()) == [race.OURS, race.BY_HAND]
    assert "scripts/install peers" in capsys.readouterr().out


@NOLOAD
@pytest.mark.slow
def test_our_way_runs_the_eight_trials() -> None:
    seconds, accuracy = race.run(race.OURS, race.COMMANDS[race.OURS](Lengths(15, 6, 5)))

    assert seconds > 0
    assert 0.1 < accuracy <= 1


@pytest.mark.slow
def test_dynamics_are_raced_against_the_keeper_and_a_pruning(tmp_path: Path) -> None:
    bench_dynamics.main(["--quick", "--json", str(tmp_path / "found.json")])

    found = json.loads((tmp_path / "found.json").read_text())
    names = {row["what"].split()[2] for row in found["rows"]}
    assert names == set(pruning.dynamics.DYNAMICS)
    assert all(row["ours"] > 0 for row in found["rows"])
