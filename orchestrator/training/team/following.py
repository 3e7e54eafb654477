"""The ranks that follow rank 0: they take part in its trainings, and wait for it in between."""

from __future__ import annotations

from orchestrator.core.specs import TEACHER
from orchestrator.core.work_order import WorkOrder
from orchestrator.training import ways
from orchestrator.training.stage_inputs import StageInputs
from orchestrator.training.stage_networks import initialised
from orchestrator.training.training_stages import run_job
from pruning import MaskSet


def follow(order: WorkOrder) -> None:
    """Take part in every training that rank 0 begins, until it says that the work has ended.

    Raises:
        RankLost: another rank failed.
        training_loop.Cancelled: rank 0 was asked to end within a training.
    """
    ranks, stages, network = order.worker.ranks, {stage.spec.key: stage for stage in order.stages}, None
    while (said := ranks.hear()) is not None:
        stage = stages[said["stage"]]
        network = network or initialised(stage)
        masks = ranks.bytes_of_leader(None)
        network.masks = MaskSet.from_bytes(masks, network.model) if masks else MaskSet({})
        _take_part(StageInputs.of(stage, network))


def _take_part(stage: StageInputs) -> None:
    """Train as rank 0 does, with its state."""
    ways.train(stage, stage.job(stage.other_network(TEACHER)), lambda job, _: run_job(stage, job))
