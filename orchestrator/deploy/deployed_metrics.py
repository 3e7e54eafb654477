"""Metrics of a network in a format that changes its outputs, and the calibration examples of such a format."""

from __future__ import annotations

import math

import torch
from torch import nn

from orchestrator.core.seeding import derive, seeded
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_fields import ScoreFields
from orchestrator.deploy.formats.format import Run, called_with, running_as
from orchestrator.training.loop.evaluation import evaluate
from orchestrator.training.scoring.examples import ScoringData
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.tasks import task_building
from pruning.graph.tracing import Example

CPU = torch.device("cpu")


def calibration_inputs(network: nn.Module, data: Data, left: StageSpec, count: int) -> Example:
    """Return the network's inputs for `count` examples of the training split, drawn without augmentation.

    Args:
        network: the network to call.
        data: the splits.
        left: the stage that trained the network; its seed decides which examples are drawn.
        count: number of examples.
    """
    seed = derive(left.typed.seed, "calibration")
    with seeded(seed):  # a Dataset may draw random numbers
        batches = ScoringData(data.train, ScoreFields(examples=count), seed, CPU).batches(1)
    assert batches is not None
    return called_with(network, batches[0])  # the only batch has all examples


def metrics_of(network: nn.Module, run: Run, data: Data, left: StageSpec) -> dict[str, float]:
    """Return the finite metrics of the outputs of `run` on the validation and test splits, such as `val/rmse`.

    Args:
        network: the network as the task calls it; `run` computes its outputs.
        run: the network in the format.
        data: the splits.
        left: the stage that trained the network; gives the task and the batch size.
    """
    task, size = task_building.build(left.typed.task), left.training_config["eval_batch_size"]
    found: dict[str, float] = {}
    for split, examples in (("val", data.val), ("test", data.test)):
        measured = evaluate(running_as(network, run), examples, task, device=CPU, batch_size=size)
        found |= {f"{split}/{metric.name}": measured.figures.get(metric.name, math.nan) for metric in task.metrics}
    return {name: value for name, value in found.items() if math.isfinite(value)}
