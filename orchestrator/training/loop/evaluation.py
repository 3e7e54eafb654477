"""Evaluate a network on a split with the metrics of its task."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import nn

from orchestrator.config.training import Train
from orchestrator.core.metrics import Metric
from orchestrator.core.seeding import seeded
from orchestrator.training.team.ranks import Processes, Ranks
from orchestrator.workloads.splits import Split
from orchestrator.workloads.tasks.distilled import Distilled
from orchestrator.workloads.tasks.task import Measured, MeasuresTests, Summed, Task, TestInputs
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
    inputs: TestInputs | None = None,
) -> Measured:
    """Return the metrics of `task` for `model` on `split`; on a test split with all that the task measures there.

    Random draws of the network or the Dataset are the same in every evaluation. The modes of all modules and the states
    of the random generators are restored afterwards.

    Args:
        model: the network.
        split: the split.
        task: the task.
        device: device of the network.
        batch_size: number of examples in a batch.
        precision: `fp32`, `bf16` or `fp16`.
        inputs: inputs of a measurement on a test split; None for other splits.
    """
    with seeded(0, device), in_mode(model, training=False), torch.no_grad(), autocast(device, precision):
        batches = split.batches(batch_size, device=device)
        if inputs is not None and isinstance(task, MeasuresTests):
            return measured(task, task.measure_test(model, batches, inputs))
        return measured(task, task.measure(model, batches))


def evaluate_together(
    model: nn.Module,
    split: Split,
    task: Task,
    device: torch.device,
    config: Train,
    ranks: Processes,
) -> Mapping[str, float]:
    """Return the figures that `evaluate` returns; with several ranks, each must call this and measures a share.

    Each rank sums over its share of every batch, and the exact sums of all ranks are added. Buffers become those of
    rank 0. Rank 0 alone measures a task with a `measure` of its own, which need not be a sum.
    """
    size, precision = config.eval_batch_size, config.precision
    alone = partial(evaluate, model, split, task, device=device, batch_size=size, precision=precision)
    task = task.task if isinstance(task, Distilled) else task
    if not isinstance(ranks, Ranks) or not isinstance(task, Summed) or type(task).measure is not Summed.measure:
        return ranks.told(alone().figures if ranks.leads else None)
    ranks.buffers_of_leader(model)
    with seeded(0, device), in_mode(model, training=False), torch.no_grad(), autocast(device, precision):
        parts = split.batches(size, device=device, share=ranks.share)
        own = task.totals(model, (part.batch for part in parts if part.counts))
    return measured(task, task.figures(ranks.whole_of(own))).figures


def generated(model: nn.Module, task: Task, inputs: TestInputs, precision: str) -> list[dict[str, str]]:
    """Return the network's continuations of the task's prompts; empty for a task without prompts."""
    if not isinstance(task, MeasuresTests):
        return []
    with seeded(0, inputs.device), in_mode(model, training=False), torch.no_grad(), autocast(inputs.device, precision):
        return task.generations(model, inputs)


def monitored(task: Task, name: str | None, where: str) -> Metric:
    """Return the metric that decides which weights are best: `name`, or the task's primary metric if `name` is None.

    Args:
        task: the task that measures the metrics.
        name: `monitor` of a training.
        where: the training's place in the configuration, for errors.

    Raises:
        TaskError: the task has no metric `name`.
    """
    known = {metric.name: metric for metric in (*task.metrics, Metric("loss", "", "lower", margin=0.0))}
    if name is not None and name not in known:
        raise TaskError(
            f"`{where}.monitor` (={name}) must be one of {', '.join(known)}, the metrics of the task; pass null for "
            f"{task.metrics[0].name}."
        )
    return known[name or task.metrics[0].name]


def autocast(device: torch.device, precision: str) -> AbstractContextManager[object]:
    """Return a context that runs operations in `precision`; it does nothing for fp32, and so takes no time."""
    return torch.autocast(device.type, dtype=_DTYPES[precision]) if precision in _DTYPES else nullcontext()
