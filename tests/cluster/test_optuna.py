"""Hydra's Optuna sweeper on our launcher: each batch of trials is one sweep, and all share one store. Slow."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("optuna") is None, reason="the extra is not installed: hydra-optuna-sweeper"
    ),
]

SEARCH = (
    "-m",
    "hydra/sweeper=optuna",
    "hydra.sweeper.direction=maximize",
    "hydra.sweeper.n_trials=4",
    "hydra.sweeper.n_jobs=2",
    "hydra.sweeper.sampler.seed=0",
    "schedule.sparsity=interval(0.3,0.95)",
    "schedule.rounds=2",
    "model=mlp",
    "model.hidden=[16]",
    "train.epochs=2",
    "finetune.epochs=1",
    "cluster=inline",
    "tracking=none",
)


def search(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    without_figures = str(Path(__file__).parents[1] / "without_figures")
    import_path = os.pathsep.join(filter(None, [without_figures, os.environ.get("PYTHONPATH", "")]))
    return subprocess.run(
        [sys.executable, "-m", "orchestrator", *SEARCH, *overrides],
        cwd=folder,
        env={**os.environ, "HOME": str(folder), "OMP_NUM_THREADS": "1", "PYTHONPATH": import_path},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_the_search_is_told_each_trials_objective(tmp_path: Path) -> None:
    result = search(tmp_path, "objective=matching_sparsity")

    assert result.returncode == 0, result.stdout + result.stderr
    best = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())
    reached = {float(found) / 100 for found in re.findall(r"sparsity (\d+\.\d\d)%, validation accuracy", result.stdout)}
    assert best["name"] == "optuna"
    assert any(abs(best["best_value"] - each) < 1e-4 for each in reached | {0.0})
    assert best["best_value"] <= best["best_params"]["schedule.sparsity"] + 1e-4
    assert result.stdout.count("Sweep sweep-") == 2, "two batches of two trials"
    assert result.stdout.count("finished  dense") == 1, "the second batch finds the dense network in the store"


def test_a_search_has_several_objectives(tmp_path: Path) -> None:
    several = "objective=[val/accuracy,parameters/remaining]", "hydra.sweeper.direction=[maximize,minimize]"
    result = search(tmp_path, *several)

    assert result.returncode == 0, result.stdout + result.stderr
    front = yaml.safe_load((tmp_path / "optimization_results.yaml").read_text())["solutions"]
    assert all(0 <= accuracy <= 1 < parameters for accuracy, parameters in (each["values"] for each in front))


def test_a_failed_trial_ends_the_search(tmp_path: Path) -> None:
    result = search(tmp_path, "finetune.optimizer.lr=1e30")

    assert result.returncode == 1, result.stdout + result.stderr
    assert "2 of 2 trials failed" in result.stderr
    assert "Traceback" not in result.stderr
