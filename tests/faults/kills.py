"""Run a stage in processes that are killed at random moments of its training, for every variant of a training."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from orchestrator.core.records import StageRecord
from orchestrator.core.specs import NETWORK, StageSpec
from orchestrator.core.work_order import Worker, WorkOrder
from orchestrator.execution.segment import run_segment
from orchestrator.store.store import Store
from orchestrator.store.unfinished_stages import Checkpoints
from orchestrator.training.loop import training_loop
from orchestrator.training.state import checkpointing
from orchestrator.training.state.train_state import TrainState
from orchestrator.workloads.data_loading import load

SGD = {"_target_": "torch.optim.SGD", "lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}
ADAM = {"_target_": "torch.optim.Adam", "lr": 1e-3}
COSINE = {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None}
PLATEAU = {"_target_": "torch.optim.lr_scheduler.ReduceLROnPlateau", "patience": 0}
TRAIN = {"batch_size": 16, "eval_batch_size": 512, "precision": "fp32", "loss": None, "optimizer": SGD}
TASK = {"kind": "classification"}
DIGITS = {"kind": "digits", "val_fraction": 0.15}
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    "momentum, dropout, batch norm": {},
    "adam, cosine": {"optimizer": ADAM, "scheduler": COSINE},
    "plateau": {"scheduler": PLATEAU, "eval_every": 20},
    "early stopping": {"eval_every": 15, "monitor": "loss"},
    "accumulation": {"accumulate": 2},
    "averages": {"ema": 0.99},
    "augmentation in workers": {},
    "masked round": {},
    "rigl round": {},
    "gradual round": {"ema": 0.99},
    "sr_ste round": {},
    "movement round": {"optimizer": ADAM},
}
DYNAMICS: Mapping[str, Mapping[str, Any]] = {
    "rigl round": {"dynamics": {"kind": "rigl", "every": 7}, "score": {"kind": "random"}},
    "gradual round": {"dynamics": {"kind": "gradual", "every": 7}},
    "sr_ste round": {"dynamics": {"kind": "sr_ste"}, "scope": {"kind": "window", "n": 2, "m": 4}, "target": 0.5},
    "movement round": {"dynamics": {"kind": "movement", "every": 7}},
}
"""Variant whose masks change within the training of the round -> fields of the round."""


class Shifted(Dataset[tuple[Tensor, int]]):
    """Digits that are shifted at random as they are read."""

    def __init__(self) -> None:
        self.images, self.labels = next(iter(load(DIGITS).train.batches(600, device=torch.device("cpu"))))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index].roll(random.randint(-1, 1), -1) + 0.1 * torch.randn(1), int(self.labels[index])


def shifted() -> dict[str, object]:
    """Custom data set whose Dataset augments."""
    whole = load(DIGITS)
    return {
        "classes": 10,
        "train": Shifted(),
        "val": (whole.val.images, whole.val.labels),
        "test": (whole.test.images, whole.test.labels),
    }  # type: ignore[attr-defined]


def stages(variant: str, epochs: int, interval: float) -> tuple[StageSpec, ...]:
    """Return a dense stage, or a dense stage and a round; the last one is to be killed.

    Args:
        epochs: approximate number of epochs of the last stage.
        interval: seconds between two checkpoints.
    """
    train = {**TRAIN, "epochs": epochs, **VARIANTS[variant]}
    if "stopping" in variant:
        train.update(epochs=2 * epochs, patience=2 * epochs)  # early stopping ends it about halfway
    data: dict[str, Any] = DIGITS
    if "workers" in variant:
        data = {"_target_": f"{__name__}.shifted", "num_workers": 1}
    model = {"kind": "cnn", "input_shape": None, "classes": None, "channels": [8, 16], "dropout": 0.2}
    fields = {"model": model, "data": data, "task": TASK, "train": train, "seed": 1, "device": "cpu", "threads": 1}
    often = {part: {"checkpoint_minutes": interval / 60} for part in ("train", "finetune")}
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
    if "sr_ste" in variant:
        prune["exclude"] = ["conv1.*"]  # one input channel
    method = {} if variant in DYNAMICS else {"kind": "random_unstructured"}
    rest = {"task": TASK, "method": method, "prune": prune, "finetune": train, "seed": 1, "round": 1, "target": 0.6}
    rest |= DYNAMICS.get(variant, {})
    return dense, StageSpec("round", rest, {NETWORK: dense.key}, location=often)


class Progress(ctypes.Structure):
    """Progress of an attempt, in shared memory that the killer reads; times are in seconds of the monotonic clock."""

    _fields_ = (
        ("began", ctypes.c_int64),  # the step that the attempt continued from, -1 before
        ("step", ctypes.c_int64),
        ("safe", ctypes.c_double),  # end of the last durable work: the start of the attempt, or its last checkpoint
        ("writing", ctypes.c_double),  # start of the checkpoint that is being written, 0 if none is
        ("write", ctypes.c_double),  # duration of the longest checkpoint
        ("batch", ctypes.c_double),  # duration of the longest batch with its evaluation
    )


@dataclass(frozen=True)
class Kill:
    """A kill of an attempt."""

    step: int
    kept: int
    """Step that the next attempt continues from."""
    lost: float
    """Seconds of work that were lost, since the last durable work."""
    write: float
    """Seconds of the attempt's longest checkpoint."""
    batch: float
    """Seconds of the attempt's longest batch."""


def undisturbed(root: Path, specs: tuple[StageSpec, ...]) -> StageRecord:
    """Run the stages without kills and checkpoints, and return the record of the last one."""
    order = WorkOrder(tuple(replace(spec, location={}) for spec in specs), Worker(Store(str(root))))
    record = list(run_segment(order))[-1]
    gc.collect()  # loaders, whose worker processes those that are forked from this one do not have
    return record


def disturbed(
    root: Path, specs: tuple[StageSpec, ...], steps: int, kills: int, longest: float, rng: random.Random
) -> list[Kill]:
    """Run the stages, the last one in processes that are killed; each process continues from the latest checkpoint.

    Args:
        steps: number of steps of the last stage.
        kills: number of kills, at moments drawn uniformly from its training without the last tenth.
        longest: largest random delay of a kill in seconds, so that it may fall into a checkpoint.
    """
    context, store, last = multiprocessing.get_context("fork"), Store(str(root)), specs[-1].key
    if len(specs) > 1:
        list(run_segment(WorkOrder(specs[:-1], Worker(store))))
    moments, found = sorted(rng.randrange(max(1, steps * 9 // 10)) for _ in range(kills)), []
    while not store.finished([last]):
        kept, progress = max(store.checkpoints.reached(last).number, 0), context.Value(Progress, -1, lock=False)
        process = context.Process(target=_work, args=(root, specs, progress))
        process.start()
        while process.is_alive() and (progress.began < 0 or (moments and progress.step < moments[0])):
            time.sleep(0.001)
        if moments:
            process.join(rng.uniform(0.0, longest))
        if moments and process.is_alive():
            process.kill()
            found.append(_killed(process, progress, store.checkpoints, last))
            del moments[0]
        process.join()
        assert process.exitcode in (0, -9)
        assert progress.began == kept, "an attempt goes on from the last checkpoint"
        assert store.finished([last]) or max(store.checkpoints.reached(last).number, 0) >= kept, "no checkpoint is lost"
    return found


def _killed(process: BaseProcess, progress: Any, checkpoints: Checkpoints, key: str) -> Kill:
    now = time.monotonic()
    process.join()
    write = max(progress.write, now - progress.writing if progress.writing else 0.0)
    kept = max(checkpoints.reached(key).number, 0)
    return Kill(progress.step, kept, now - progress.safe, write, max(progress.batch, 0.0))


def _work(root: Path, specs: tuple[StageSpec, ...], progress: Any) -> None:
    """Run the last stage in its own process, with a checkpoint whenever one is due, whatever it costs."""
    checkpointing.MOST_SHARE = 1.0
    train = training_loop._LoopRun.train

    def noted(run: training_loop._LoopRun, last: int) -> None:
        progress.step, progress.safe = run.step, (went := time.monotonic())
        progress.began, keep = run.step, run.job.keep

        def note(current: Callable[[], TrainState], ending: bool) -> None:
            nonlocal went
            progress.batch, progress.step = max(progress.batch, time.monotonic() - went), run.step
            keep(lambda: begun(current), ending)
            went = time.monotonic()
            if progress.writing:
                progress.write, progress.safe = max(progress.write, went - progress.writing), went
                progress.writing = 0.0

        def begun(current: Callable[[], TrainState]) -> TrainState:
            progress.writing = time.monotonic()
            return current()

        run.job = replace(run.job, keep=note)
        train(run, last)

    training_loop._LoopRun.train = noted  # type: ignore[method-assign]
    list(run_segment(WorkOrder(specs[-1:], Worker(Store(str(root))), lineage=specs[:-1])))
    os._exit(0)


def each(record: StageRecord, store: Store) -> tuple[dict[str, Any], bytes]:
    """Return the parts of a stage that must be bit-equal."""
    return record.result(), store.read(record.key, "weights.safetensors")
