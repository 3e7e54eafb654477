"""Part of scripts/does_it_pay that measures networks pruned by a sweep, with their accuracy."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

import orchestrator
from orchestrator.results.trial_results import TrialResults
from scripts.pages.network_cells import Network, images, network_part
from scripts.pages.pay_cells import Cell, Part

FOLDER = Path(__file__).resolve().parents[2] / "build" / "does_it_pay"
"""Working directory of the sweeps; their store keeps what is finished."""
SPARSITY = 0.9
COMMON = (
    "data._target_=scripts.pages.enlarged_digits.load",
    "method=l1_unstructured",
    "schedule=one_shot",
    f"schedule.sparsity={SPARSITY}",
    "cluster=inline",
    "tracking=none",
)
SWEEPS: Mapping[str, tuple[str, tuple[int, int, int], tuple[str, ...]]] = {
    "LeNet-300-100 on 28x28": ("lenet_300_100", (1, 28, 28), ("train.epochs=30", "finetune.epochs=30")),
    "ResNet-20 on 3x32x32": ("resnet20", (3, 32, 32), ("train.epochs=12", "finetune.epochs=12")),
}
"""Network -> its model, shape of inputs and lengths."""


def command(network: str) -> list[str]:
    """Return the sweep's command line, without the interpreter."""
    model, (channels, size, _), lengths = SWEEPS[network]
    shape = (f"data.name=digits_{size}", f"+data.size={size}", f"+data.channels={channels}")
    return ["-m", "orchestrator", f"name={model}_for_speed", f"model={model}", *COMMON, *shape, *lengths]


@cache
def trained(network: str) -> TrialResults:
    """Train, prune and fine-tune a network, or read what an earlier run did."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, *command(network)], cwd=FOLDER, check=True)
    (trial,) = orchestrator.open(str(FOLDER / "store")).sweep().trials
    return trial


def trained_part() -> Part:
    """Return the measurements of the trained networks."""
    return network_part([_network(name) for name in SWEEPS], "trained", further=_accuracy)


def _network(name: str) -> Network:
    def dense() -> nn.Module:
        return trained(name).model(0, run_own_code=True)

    def pruned(_: nn.Module, __: float) -> nn.Module:
        return trained(name).model(run_own_code=True)

    return Network(f"{name}, trained", dense, images(*SWEEPS[name][1]), (SPARSITY,), pruned)


def _accuracy(cell: Cell) -> dict[str, Any]:
    """Return accuracies on the test split, and the command that trains the network."""
    name = cell.subject.rpartition(", trained")[0]
    trial = trained(name)
    return {
        "network": name,
        "accuracy_dense": trial.record(0).after["test/accuracy"],
        "accuracy_pruned": trial.record().after["test/accuracy"],
        "command": shlex.join(["python", *command(name)]),
    }
