"""Ways to train a stage's network: a table of rows; the first row that applies and can train the network trains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from orchestrator.core.seeding import derive
from orchestrator.core.stage_kinds import KINDS
from orchestrator.training.loop import sparse_training
from orchestrator.training.loop.sparse_training import cost_of
from orchestrator.training.loop.steps import TrainingError, kept_gradients
from orchestrator.training.loop.training_job import FitResult, TrainingJob
from orchestrator.training.pruning_rounds import masked
from orchestrator.training.stage_inputs import StageInputs
from orchestrator.training.stage_networks import masks_of
from orchestrator.training.state import from_scratch
from pruning import LowRankUpdates, MaskKeeper, remove_all

Run = Callable[[TrainingJob, Sequence[Tensor | None] | None], FitResult]
"""Runs a job; gets the masks of its trained parameters, in order, if it may continue the dense training."""


@dataclass(frozen=True)
class Way:
    """A way to train the network of a stage, whose masks are set."""

    applies: Callable[[StageInputs], bool]
    train: Callable[[StageInputs, TrainingJob, Run], FitResult | None]
    """Trains the job's network in place; returns None if this network must be trained in another way."""


def train(stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train the network of a stage in the first way that applies."""
    ways = (way for way in WAYS if way.applies(stage))
    return next(fit for way in ways if (fit := way.train(stage, job, run)) is not None)


def _train_plain(_stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    return run(job, None)


def _train_hooked(_stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train under masks that forward hooks apply, as `torch.nn.utils.prune` does."""
    in_order = masks_of(job.model, job.masks)
    job.masks.apply(job.model)
    fit = run(job, in_order)
    remove_all(job.model)
    return fit


def _train_masked(_stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train under masks that stay, which hooks of the optimizer keep in force."""
    in_order = masks_of(job.model, job.masks)
    keeper = MaskKeeper(job.model, job.masks, kept_gradients(job.config))
    fit = run(replace(job, on_optimizer=keeper.attach), in_order)
    keeper.release()
    return fit


def _train_low_rank(stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train low-rank updates of linear layers and merge them; they begin anew, so they continue no dense training."""
    config, spec = job.config, stage.spec
    job = replace(job, cost=cost_of(job.model, job.data, job.device, job.masks, None))
    masked(job.model, job.masks)
    draws = torch.Generator().manual_seed(derive(spec.typed.seed, f"{spec.round}/lora"))
    settings = (config["lora_rank"], config["lora_alpha"], config["lora_targets"])
    try:
        updates = LowRankUpdates(job.model, job.masks, *settings, draws)
    except ValueError as error:
        raise TrainingError(
            f"{str(error).replace('`targets`', '`finetune.lora_targets`')} Pass another pattern, or "
            "finetune.lora_rank=null."
        ) from error
    fit = run(job, None)
    updates.merge()
    return fit


WAYS = (
    Way(lambda stage: not KINDS[stage.spec.kind].prunes, _train_plain),
    Way(lambda stage: stage.is_small, from_scratch.train_anew),
    Way(lambda stage: from_scratch.may_be_smaller(stage.spec), from_scratch.train_smaller),
    Way(lambda stage: stage.asked.choices.dynamics.row.in_training, sparse_training.train_changing),
    Way(lambda stage: stage.config.get("lora_rank") is not None, _train_low_rank),
    Way(lambda stage: stage.spec.typed.prune.holding == "hooks" and stage.network.masks.sparsity() > 0, _train_hooked),
    Way(lambda _: True, _train_masked),
)
"""In order: a later way may assume that no earlier one applies."""
