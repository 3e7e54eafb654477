"""What a network achieves in a format that changes its outputs, and the examples that such a format is written by."""

from __future__ import annotations

import math

import torch
from torch import nn

from orchestrator.core.seeding import derive, seeded
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_fields import ScoreFields
from orchestrator.deploy.formats.format import Run, called_with, running_as
from orchestrator.training.evaluation import evaluate
from orchestrator.training.scoring.examples import ScoringData
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.tasks import task_building
from pruning.graph.tracing import Example

CPU = torch.device("cpu")


def drawn(network: nn.Module, data: Data, left: StageSpec, count: int) -> Example:
    """Return what a network is called with for so many examples of the training split, without augmentation.

    Args:
        left: the stage that left the network; which examples they are follows from its seed.
    """
    seed = derive(left.typed.seed, "calibration")
    with seeded(seed):  # a Dataset may draw
        batches = ScoringData(data.train, ScoreFields(examples=count), seed, CPU).batches(1)
    assert batches is not None
    return called_with(network, batches[0])  # all of them


def achieved(network: nn.Module, run: Run, data: Data, left: StageSpec) -> dict[str, float]:
    """Return the metrics of a network whose outputs are those of `run`, by split, as `val/rmse` and `test/rmse`.

    Args:
        network: as the task calls it.
        left: the stage that left it, of which the task is, and how many examples it is measured by at a time.
    """
    task, size = task_building.build(left.typed.task), left.training_config["eval_batch_size"]
    found: dict[str, float] = {}
    for split, examples in (("val", data.val), ("test", data.test)):
        measured = evaluate(running_as(network, run), examples, task, device=CPU, batch_size=size)
        found |= {f"{split}/{metric.name}": measured.figures.get(metric.name, math.nan) for metric in task.metrics}
    return {name: value for name, value in found.items() if math.isfinite(value)}
