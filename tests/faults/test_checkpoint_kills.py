"""A worker that is killed at random moments, in the midst of a checkpoint too, ends with the same bits."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
from dataclasses import replace
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, StageSpec
from orchestrator.core.work_order import WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.training import loop
from orchestrator.training.state import checkpointing
from orchestrator.workloads.data import load

SGD = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
ADAM = {"_target_": "torch.optim.Adam", "lr": 1e-3}
COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None}
PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0}
TRAIN = {"epochs": 4, "batch_size": 16, "eval_batch_size": 512, "precision": "fp32", "loss": None, "optimizer": SGD}
TASK = {"kind": "classification"}
DIGITS = {"kind": "digits", "val_fraction": 0.15}
VARIANTS: dict[str, dict[str, Any]] = {
    "momentum, dropout, batch norm": {},
    "adam, cosine": {"optimizer": ADAM, "scheduler": COSINE},
    "plateau": {"scheduler": PLATEAU, "eval_every": 20},
    "early stopping": {"patience": 40, "eval_every": 15, "monitor": "loss"},
    "accumulation": {"accumulate": 2},
    "averages": {"ema": 0.99},
    "augmentation in workers": {},
    "masked round": {},
}
FAST = ("momentum, dropout, batch norm", "masked round")


class Shifted(Dataset[tuple[Tensor, int]]):
    """Digits, each moved at random as it is read."""

    def __init__(self) -> None:
        self.images, self.labels = next(iter(load(DIGITS).train.batches(600, device=torch.device("cpu"))))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].roll(random.randint(-1, 1), -1) + 0.1 * torch.randn(1), int(self.labels[index])


def shifted() -> dict[str, object]:
    """A data set of the user's own, whose Dataset augments."""
    whole = load(DIGITS)
    return {
        "classes": 10,
        "train": Shifted(),
        "val": (whole.val.images, whole.val.labels),
        "test": (whole.test.images, whole.test.labels),
    }  # type: ignore[attr-defined]


def stages(variant: str, epochs: int) -> tuple[StageSpec, ...]:
    """Return a dense stage, or one and the round that is killed."""
    train = {**TRAIN, "epochs": epochs, **VARIANTS[variant]}
    data: dict[str, Any] = DIGITS
    if "workers" in variant:
        data = {"_target_": f"{__name__}.shifted", "num_workers": 1}
    model = {"kind": "cnn", "input_shape": None, "classes": None, "channels": [8, 16], "dropout": 0.2}
    fields = {"model": model, "data": data, "task": TASK, "train": train, "seed": 1, "device": "cpu", "threads": 1}
    often = {part: {"checkpoint_minutes": 0.05 / 60} for part in ("train", "finetune")}
    dense = StageSpec("dense", fields, location=often)
    if "round" not in variant:
        return (dense,)
    dense = StageSpec("dense", {**fields, "train": {**train, "epochs": 1}}, location=often)
    prune = {
        "types": ["Conv2d", "Linear"],
        "parameters": ["weight"],
        "include": ["*"],
        "exclude": [],
        "holding": "keeper",
    }
    method = {"kind": "random_unstructured", "scope": "layer"}
    rest = {"task": TASK, "method": method, "prune": prune, "finetune": train, "seed": 1, "round": 1, "target": 0.6}
    return dense, StageSpec("round", rest, {NETWORK: dense.key}, location=often)


def work(root: Path, specs: tuple[StageSpec, ...], began: Synchronized[int]) -> None:
    """Run what is left in a process of its own, checkpoints as often as they are due, however much they cost."""
    checkpointing.MOST_SHARE = 1.0
    train = loop._Run.train

    def noted(run: Any, *hooks: Any) -> None:
        began.value = run.step
        train(run, *hooks)

    loop._Run.train = noted  # type: ignore[method-assign, assignment]
    store = Store(str(root))
    done = store.finished([spec.key for spec in specs])
    left = tuple(spec for spec in specs if spec.key not in done)
    list(run_segment(WorkOrder(left, store, lineage=specs[: len(specs) - len(left)])))
    os._exit(0)


def disturbed(root: Path, specs: tuple[StageSpec, ...], kills: int, longest: float, rng: random.Random) -> int:
    """Run the stages in processes that are killed at random moments of their training; return how many were."""
    context, store, killed, last = multiprocessing.get_context("fork"), Store(str(root)), 0, specs[-1].key
    while not store.finished([last]):
        reached, began = store.checkpoints.reached(last), context.Value("q", -1)
        process = context.Process(target=work, args=(root, specs, began))
        process.start()
        deadline = time.monotonic() + 60
        while began.value < 0 and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        if killed < kills:
            process.join(rng.uniform(0.0, longest))
            if process.is_alive():
                process.kill()
                killed += 1
        process.join(120)
        assert process.exitcode in (0, -9)
        if len(specs) == 1:
            assert began.value == max(reached, 0), "an attempt goes on from the last checkpoint"
            assert store.finished([last]) or store.checkpoints.reached(last) >= reached
    return killed


@pytest.mark.parametrize(
    "variant", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in VARIANTS]
)
def test_a_worker_that_is_killed_changes_no_bit(variant: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    most = int(request.config.getoption("--chaos", 10))
    kills = 2 if variant in FAST and most <= 10 else max(3, most // len(VARIANTS))
    specs = stages(variant, epochs=3 * kills)
    begun = time.monotonic()
    quiet = Store(str(tmp_path / "quiet"))
    expected = list(run_segment(WorkOrder(tuple(replace(spec, location={}) for spec in specs), quiet)))
    seconds = time.monotonic() - begun
    killed = disturbed(tmp_path / "disturbed", specs, kills, seconds / kills, random.Random(0))
    print(f"{variant}: {killed} kills, {seconds:.1f} s undisturbed")
    store = Store(str(tmp_path / "disturbed"))
    found = store.finished([spec.key for spec in specs])

    assert [each(found[spec.key], store) for spec in specs] == [each(record, quiet) for record in expected]
    assert store.checkpoints.known() == []
    assert killed


def each(record: StageRecord, store: Store) -> tuple[dict[str, Any], bytes]:
    """Return what must be bit-equal of a stage."""
    return record.result(), store.read(record.key, "weights.safetensors")
