"""Part of scripts/does_it_pay that measures networks pruned by a sweep, with their accuracy."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import orchestrator
from orchestrator.compare.deployment_points import by_network, deployed
from orchestrator.results.sweep_results import SweepResults
from orchestrator.results.trial_results import TrialResults
from scripts.pages.network_cells import BATCHES, MINILM, Network, images, network_part, not_found, tokens
from scripts.pages.passages import BOOK
from scripts.pages.pay_cells import Cell, Part

FOLDER = Path(__file__).resolve().parents[2] / "build" / "does_it_pay"
"""Working directory of the sweeps; their store keeps what is finished."""
SPARSITY = 0.9
COMMON = ("schedule=one_shot", f"schedule.sparsity={SPARSITY}", "cluster=inline", "tracking=none")
ENTRIES = ("method=l1_unstructured",)
BLOCKS = ("method=magnitude", "unit=block", "deploy.formats=[onnx_int8,sparse_int8]", "deploy.batch_sizes=[1]")
BRIEFLY = ("deploy.blocks=2", "deploy.seconds=0.1")
"""Settings of deployments that are only read for their metrics."""
IN_BLOCKS = (*BLOCKS, *BRIEFLY)


@dataclass(frozen=True)
class Sweep:
    """A sweep that trains, prunes and fine-tunes one network.

    Args:
        network: name of the network in tables.
        name: name of the sweep.
        model: overrides of the model.
        data: overrides of the data.
        example: batch size -> inputs of the network.
        pruning: overrides of the method, and of deployments.
        lengths: overrides of the lengths.
        batches: batch sizes to measure.
        packages: packages that it needs.
    """

    network: str
    name: str
    model: tuple[str, ...]
    data: tuple[str, ...]
    example: Callable[[int], Tensor]
    pruning: tuple[str, ...]
    lengths: tuple[str, ...]
    batches: tuple[int, ...] = BATCHES
    packages: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name of the trained network in tables."""
        return f"{self.network}, trained"

    @property
    def missing(self) -> str:
        """Packages that are not installed, in words; empty if all are."""
        return not_found(self.packages)


def _digits(channels: int, size: int) -> tuple[tuple[str, ...], Callable[[int], Tensor]]:
    """Return the overrides of digits enlarged to a size, and random inputs of that size."""
    name = (f"data.name=digits_{size}", f"+data.size={size}", f"+data.channels={channels}")
    return ("data._target_=scripts.pages.enlarged_digits.load", *name), images(channels, size, size)


def _passages(length: int, count: int, steps: int) -> Sweep:
    """Return the sweep of MiniLM on passages of so many tokens."""
    data = ("data._target_=scripts.pages.passages.load", f"+data.length={length}", f"+data.count={count}")
    lengths = tuple(
        f"{each}.{key}"
        for each in ("train", "finetune")
        for key in (
            "epochs=null",
            f"steps={steps}",
            f"batch_size={max(8, 512 // length)}",
            f"eval_every={steps}",
            "optimizer.lr=0.0001",
        )
    )
    return Sweep(
        f"MiniLM, {length} tokens",
        f"minilm_{length}_tokens_in_blocks",
        ("model._target_=scripts.pages.passages.Reader", "model.name=minilm"),
        (f"data.name=passages_{length}", *data),
        tokens(1000, 30000, length),
        IN_BLOCKS,
        ("optimizer@train.optimizer=adamw", "optimizer@finetune.optimizer=adamw", *lengths),
        (1,),
        (MINILM, BOOK, "transformers"),
    )


LENET, RESNET = "LeNet-300-100 on 28x28", "ResNet-20 on 3x32x32"
LONG, SHORT, SHORTER, SHORTEST = (
    (f"train.epochs={epochs}", f"finetune.epochs={further}") for epochs, further in ((30, 30), (12, 12), (6, 6), (3, 3))
)
SWEEPS = (
    Sweep(LENET, "lenet_300_100_for_speed", ("model=lenet_300_100",), *_digits(1, 28), ENTRIES, LONG),
    Sweep(RESNET, "resnet20_for_speed", ("model=resnet20",), *_digits(3, 32), ENTRIES, SHORT),
)
INT8_SWEEPS = (
    Sweep(LENET, "lenet_300_100_in_blocks", ("model=lenet_300_100",), *_digits(1, 28), IN_BLOCKS, LONG, (32,)),
    Sweep(RESNET, "resnet20_in_blocks", ("model=resnet20",), *_digits(3, 32), IN_BLOCKS, SHORT, (1,)),
    Sweep(
        "ResNet-20 of width 64 on 3x16x16",
        "resnet20_of_width_64_in_blocks",
        ("model=resnet20", "model.width=64"),
        *_digits(3, 16),
        IN_BLOCKS,
        SHORTER,
        (1,),
    ),
    Sweep(
        "ResNet-20 of width 64 on 3x32x32",
        "resnet20_of_width_64_on_32x32_in_blocks",
        ("model=resnet20", "model.width=64"),
        *_digits(3, 32),
        IN_BLOCKS,
        SHORTEST,
        (1,),
    ),
    _passages(16, 8000, 250),
    _passages(128, 2000, 120),
)


def command(sweep: Sweep) -> list[str]:
    """Return the sweep's command line, without the interpreter."""
    return [
        *("-m", "orchestrator", f"name={sweep.name}", *sweep.model, *sweep.data),
        *(*sweep.pruning, *COMMON, *sweep.lengths),
    ]


@cache
def swept(sweep: Sweep) -> SweepResults:
    """Train, prune and fine-tune a network, or read what an earlier run did."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, *command(sweep)], cwd=FOLDER, check=True)
    return orchestrator.open(str(FOLDER / "store")).sweep(sweep.name)


def trained(sweep: Sweep) -> TrialResults:
    """Return the only trial of a sweep."""
    (trial,) = swept(sweep).trials
    return trial


def trained_part() -> Part:
    """Return the measurements of the trained networks in float32."""
    return network_part([as_network(sweep) for sweep in SWEEPS], "trained", further=partial(accuracies, SWEEPS))


def as_network(sweep: Sweep) -> Network:
    """Return the network that a sweep trains."""

    def dense() -> nn.Module:
        return trained(sweep).model(0, run_own_code=True)

    def pruned(*_: object) -> nn.Module:
        return trained(sweep).model(run_own_code=True)

    return Network(sweep.title, dense, sweep.example, (SPARSITY,), pruned, sweep.packages, batches=sweep.batches)


def accuracies(sweeps: Sequence[Sweep], cell: Cell) -> dict[str, Any]:
    """Return accuracies on the test split, and the command that trains the network."""
    (sweep,) = (each for each in sweeps if each.title == cell.subject.rpartition(", batch")[0])
    trial = trained(sweep)
    return {
        "network": sweep.network,
        "accuracy_dense": trial.record(0).after["test/accuracy"],
        "accuracy_pruned": trial.record().after["test/accuracy"],
        **_in_8_bits(swept(sweep), trial.record().key),
        "command": shlex.join(["python", *command(sweep)]),
    }


def _in_8_bits(found: SweepResults, stage: str) -> dict[str, float]:
    """Return the accuracies of the deployments in 8 bits; empty without deployments."""
    points = {point.format: point for point in deployed([stage], by_network(found.plan, found.records))}
    if not points:
        return {}
    dense, sparse = points["onnx_int8"].dense_test, points["sparse_int8"].test
    assert dense is not None
    assert sparse is not None
    return {"accuracy_dense_int8": dense, "accuracy_sparse_int8": sparse.mean}
