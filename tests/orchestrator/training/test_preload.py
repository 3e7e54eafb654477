"""Imports of a worker before its first task."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST_STEP = """
import gc, sys
import orchestrator.training.preload
assert gc.isenabled()
before = set(sys.modules)
import torch
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.training_job import TrainingJob
from orchestrator.workloads import data_loading
from orchestrator.workloads.tasks.classification import Classification
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
config = {"steps": 1, "epochs": None, "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1}}
digits = data_loading.load({"kind": "digits"})
job = {"model": model, "data": digits, "task": Classification(), "config": config}
training_loop.fit(TrainingJob(**job, seed=0, device=torch.device("cpu")))
print(len([name for name in set(sys.modules) - before if not name.startswith("omegaconf")]))
"""


@pytest.mark.slow
def test_a_worker_has_imported_what_its_first_step_needs() -> None:
    said = subprocess.run([sys.executable, "-c", FIRST_STEP], capture_output=True, text=True, check=True).stdout

    assert int(said) < 5, "importing torch._dynamo would be hundreds"
