"""A small problem that the tests of training share: three classes of points, a network with dropout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.training.loop import training_loop
from orchestrator.training.loop.training_job import FitResult, TrainingJob
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.splits import TensorSplit
from orchestrator.workloads.tasks.classification import Classification
from orchestrator.workloads.tasks.task import Task
from orchestrator.workloads.tasks.task_building import with_loss

CPU = torch.device("cpu")
CLASSES = Classification()
TRAIN, BATCH = 50, 8
EPOCH = 7
"""Steps of an epoch: six batches of 8 and one of 2."""


def points(count: int, seed: int) -> TensorSplit:
    """Return noisy points around three corners."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    return TensorSplit(torch.randn(count, 4, generator=generator) + 1.5 * torch.eye(3, 4)[labels], labels)


def problem() -> Data:
    """Return the data."""
    return Data(points(TRAIN, 0), points(30, 1), points(30, 2), (4,), 3)


def network(seed: int = 0) -> nn.Sequential:
    """Return a network with dropout and a buffer that training moves."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def settings(**changes: Any) -> dict[str, Any]:
    """Return a plain training node: SGD with momentum, two epochs."""
    optimizer = {"_target_": "torch.optim.SGD", "lr": changes.pop("lr", 0.1), "momentum": changes.pop("momentum", 0.9)}
    return {"epochs": 2, "batch_size": BATCH, "optimizer": optimizer, **changes}


def task_of(options: dict[str, Any]) -> Task:
    """Return classification, or what is in `options`, with their loss."""
    return with_loss(options.pop("task", CLASSES), options.get("loss"), "train.loss", CPU)


def job(model: nn.Module, task: Task = CLASSES, config: dict[str, Any] | None = None, **fields: Any) -> TrainingJob:
    """Return a training of `model` on the problem."""
    given = {"data": problem(), "seed": 0, "device": CPU, **fields}
    return TrainingJob(model=model, task=task, config=config or settings(), **given)


def fit(model: nn.Module, seed: int = 0, data: Data | None = None, **options: Any) -> FitResult:
    """Train `model` on the problem; options that are hooks go into the job, the others into its settings."""
    hooks = {
        key: options.pop(key)
        for key in ("on_optimizer", "cancelled", "on_point", "state", "keep", "until", "selects", "ranks")
        if key in options
    }
    return training_loop.fit(
        job(model, task_of(options), settings(**options), data=data or problem(), seed=seed, **hooks)
    )


def after_step(act: Callable[[], object]) -> Callable[[Optimizer], object]:
    """Return what attaches `act` to an optimizer, to be called after each of its steps."""
    return lambda optimizer: optimizer.register_step_post_hook(lambda *_: act())


def state(model: nn.Module) -> list[Tensor]:
    """Return copies of all parameters and buffers."""
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether two states are bit-equal."""
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def metrics(result: FitResult) -> list[tuple[int, dict[str, float]]]:
    """Return the curve without its times."""
    return [(point.step, dict(point.metrics)) for point in result.curve]
