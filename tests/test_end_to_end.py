"""The main job, small: through Hydra, Ray, the store and MLflow, and the same bits by every way there is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

from orchestrator.__main__ import main
from orchestrator.core.records import StageRecord
from orchestrator.core.specs import Plan
from orchestrator.execution import interrupts
from orchestrator.store.store import Store
from pruning import MaskSet

SWEEP = (
    "+sweep=random_amounts",
    "schedule.sparsity=0.5,0.9",
    "schedule.rounds=2",
    "seed=0,1",
    "model=mlp",
    "model.hidden=[32]",
    "train.epochs=2",
    "finetune.epochs=1",
)
Start = Callable[..., subprocess.CompletedProcess[str]]


pytestmark = pytest.mark.slow  # its sweep takes 20 seconds; test_cli.py runs a shorter one by default


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    home = tmp_path_factory.mktemp("home")
    without_figures = str(Path(__file__).parent / "without_figures")  # test_report and test_drawing draw them
    import_path = os.pathsep.join(filter(None, [without_figures, os.environ.get("PYTHONPATH", "")]))

    def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder.mkdir(exist_ok=True)
        result = subprocess.run(
            [sys.executable, "-m", "orchestrator", *SWEEP, *arguments],
            cwd=folder,
            env={**os.environ, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert result.returncode == 0, result.stdout + result.stderr
        assert "Traceback" not in result.stderr
        return result

    return command


@pytest.fixture(scope="module")
def on_ray(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    start(folder, "cluster.num_cpus=2")
    return folder


@pytest.fixture(scope="module")
def inline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inline")
    run_here(folder)
    return folder


def run_here(folder: Path) -> None:
    """Run the sweep in this process, without its figures, which take longer than all else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", ["orchestrator", *SWEEP, "cluster=inline", "tracking=none"])
        patch.setattr(interrupts, "leave_when_interrupted", lambda *_: None)
        patch.setattr("orchestrator.views.report.report_files.report", lambda *_: {})
        main()
    GlobalHydra.instance().clear()


def results(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what must be bit-equal of every stage of the one sweep in `folder`."""
    return {key: record.result() for key, record in records(folder).items()}


def records(folder: Path) -> dict[str, StageRecord]:
    return Store(str(folder / "store")).finished(plan(folder).stages)


def plan(folder: Path) -> Plan:
    store = Store(str(folder / "store"))
    (name,) = store.sweeps()
    return Plan.from_json(store.load_sweep(name)["plan"])


def test_each_dense_network_is_trained_once(on_ray: Path) -> None:
    found = records(on_ray)

    assert len(plan(on_ray).trials) == 4
    assert sum(record.kind == "dense" for record in found.values()) == 2
    assert len(found) == 2 + 4 * 2


def test_masks_are_nested_and_reach_what_was_asked(on_ray: Path) -> None:
    store, found = Store(str(on_ray / "store")), records(on_ray)
    for trial in plan(on_ray).trials:
        first, last = (MaskSet.from_bytes(store.read(key, "masks.npz")) for key in trial.stages[1:])
        assert last.nested_in(first)
        assert last.sparsity() == found[trial.stages[2]].sparsity
        for name, size in last.sizes().items():
            assert last.kept()[name] == size - round(trial.config["schedule"]["sparsity"] * size)


def test_another_executor_gives_the_same_bits(on_ray: Path, inline: Path) -> None:
    assert results(inline) == results(on_ray)


def test_another_number_of_workers_gives_the_same_bits(inline: Path, start: Start, tmp_path: Path) -> None:
    start(tmp_path, "cluster.num_cpus=1", "tracking=none")

    assert results(tmp_path) == results(inline)


def test_a_resumed_sweep_gives_the_same_bits(inline: Path, on_ray: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, trial = Store(str(inline / "store")), plan(inline).trials[0]
    for key in trial.stages[1:]:
        store.discard(key)
    run_here(inline)

    assert "; 2 stages to run." in capsys.readouterr().out
    assert results(inline) == results(on_ray)


def test_the_same_command_again_trains_nothing(on_ray: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = records(on_ray)
    run_here(on_ray)

    assert "; 0 stages to run." in capsys.readouterr().out
    assert records(on_ray) == before


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mlflow's own, on import
def test_mlflow_shows_every_trial_finished_with_masks_that_match(on_ray: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{on_ray}/mlflow.db")
    (experiment,) = [each for each in client.search_experiments() if each.name == "pruning"]
    runs = client.search_runs([experiment.experiment_id])
    children = [run for run in runs if "mlflow.parentRunId" in run.data.tags]

    assert len(runs) == 5
    assert len(children) == 4
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert len({frozenset(run.data.metrics) for run in children}) == 1, "the same metric keys in every child"
    for run in children:
        for point in client.get_metric_history(run.info.run_id, "rounds/sparsity/overall"):
            path = client.download_artifacts(run.info.run_id, f"masks/round_{point.step}.npz")
            assert MaskSet.load(path).sparsity() == point.value
