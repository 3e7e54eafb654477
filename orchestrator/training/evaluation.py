"""Measure a network on a split, as its task says."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from orchestrator.core.metrics import Metric
from orchestrator.core.seeding import seeded
from orchestrator.workloads.splits import Split
from orchestrator.workloads.tasks.task import Measured, Task
from orchestrator.workloads.tasks.task_building import TaskError, measured
from pruning.measure.macs import in_mode

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def evaluate(
    model: nn.Module,
    split: Split,
    task: Task,
    *,
    device: torch.device,
    batch_size: int = 512,
    precision: str = "fp32",
) -> Measured:
    """Return what `task` measures of `model` on `split`.

    What a network or a Dataset draws is the same in every evaluation. Training modes and generators are restored.
    """
    with seeded(0, device), in_mode(model, training=False), torch.no_grad(), autocast(device, precision):
        return measured(task, task.measure(model, split.batches(batch_size, device=device)))


def monitored(task: Task, name: str | None, where: str) -> Metric:
    """Return the metric that says what best means: of this name, the primary one where it is None.

    Args:
        task: what measures.
        name: `monitor` of a training.
        where: the training's place in the configuration, for errors.

    Raises:
        TaskError: the task measures no such thing
    """
    known = {metric.name: metric for metric in (*task.metrics, Metric("loss", "", "lower", margin=0.0))}
    if name is not None and name not in known:
        raise TaskError(
            f"`{where}.monitor` (={name}) must be one of {', '.join(known)}, which the task measures; pass null for "
            f"{task.metrics[0].name}."
        )
    return known[name or task.metrics[0].name]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return the scope in which operations run in `precision`; for fp32 it does nothing, and so takes no time."""
    return torch.autocast(device.type, dtype=_DTYPES[precision]) if precision in _DTYPES else nullcontext()
