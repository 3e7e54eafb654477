"""Run one stage: train the dense network, or prune and fine-tune one round, on one rank or several. No Ray, no MLflow.

The result depends only on the stage's spec and on the network it starts from. That network is on its device already, or
it is restored from the store; both give the same bits.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from orchestrator.core.file_names import STATE
from orchestrator.core.records import BLOCKS, CurvePoint
from orchestrator.core.seeding import derive
from orchestrator.core.specs import DENSE, RATES, TEACHER
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import Result, StageOrder, WorkOrder
from orchestrator.training import pruning_rounds
from orchestrator.training.loop import sparse_training, training_loop
from orchestrator.training.loop.own_loop import run_own_loop
from orchestrator.training.loop.sparse_training import cost_of, first_masks
from orchestrator.training.loop.training_job import FitResult, TrainingError, TrainingJob, kept_gradients
from orchestrator.training.pruning_rounds import Blocks, masked
from orchestrator.training.scoring.ranking import Scoring
from orchestrator.training.stage_networks import Network, fitting, initialised, masks_of, restored
from orchestrator.training.stage_record import (
    StageClock,
    StageInputs,
    Trained,
    measure,
    measure_all,
    record,
    require_number,
)
from orchestrator.training.state import from_scratch
from orchestrator.training.state.checkpointing import Checkpointing, environment
from orchestrator.training.state.resuming import Unfit, furthest, onward, restart
from orchestrator.training.state.train_state import TrainState, as_bytes, as_tensor
from orchestrator.workloads.inspection import require_finite
from orchestrator.workloads.model_building import untold
from orchestrator.workloads.tasks.task import Measured
from orchestrator.workloads.weight_files import plain_state
from pruning import LowRankUpdates, MaskKeeper, MaskSet, remove_all
from pruning.measure.matrix_weights import considered

Run = Callable[[TrainingJob, Sequence[Tensor | None] | None], FitResult]
"""Runs a job; gets the masks of its trained parameters, in order, if it may continue the dense training."""


@dataclass(frozen=True)
class Way:
    """A way to train the network of a stage, whose masks are set."""

    applies: Callable[[StageInputs], bool]
    train: Callable[[StageInputs, TrainingJob, Run], FitResult | None]
    """Trains the job's network in place; returns None if this network must be trained in another way."""


def train_network(stage: StageInputs, job: TrainingJob, run: Run) -> FitResult:
    """Train the network of a stage in the first way that applies."""
    ways = (way for way in WAYS if way.applies(stage))
    return next(fit for way in ways if (fit := way.train(stage, job, run)) is not None)


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
    Way(lambda stage: not KINDS[stage.spec.kind].prunes, lambda _, job, run: run(job, None)),
    Way(lambda stage: stage.is_small, from_scratch.train_anew),
    Way(lambda stage: from_scratch.may_be_smaller(stage.spec), from_scratch.train_smaller),
    Way(lambda stage: stage.asked.choices.dynamics.row.in_training, sparse_training.train_changing),
    Way(lambda stage: stage.config.get("lora_rank") is not None, _train_low_rank),
    Way(lambda stage: stage.spec.typed.prune.holding == "hooks" and stage.network.masks.sparsity() > 0, _train_hooked),
    Way(lambda _: True, _train_masked),
)
"""In order: a later way may assume that no earlier one applies."""


Start = tuple[MaskSet, Mapping[str, float], Scoring]
"""Start of a round's training: its masks, metrics before fine-tuning, and scoring costs."""


def train_dense(order: StageOrder, _network: object) -> Result:
    """Build a network and train it: a dense stage to the end; a start stage to its step, with its state as a result.

    Raises:
        training_loop.Cancelled: at a batch boundary, after the stage was cancelled.
        OrchestratorError: the user can fix the cause: a diverging loss, a target that cannot be built.
    """
    return _run_stage(order, partial(initialised, order), _train)


def prune_and_finetune(order: StageOrder, network: object) -> Result:
    """Prune the network in memory, or else the one in the store, and fine-tune the pruned network.

    Raises:
        training_loop.Cancelled: at a batch boundary, after the stage was cancelled.
        OrchestratorError: the user can fix the cause: a diverging loss, a broken law, a target that cannot be built.
    """
    live = [each for each in (network,) if isinstance(each, Network)]
    return _run_stage(order, lambda: live.pop() if live else restored(str(order.spec.parent), order), _prune_and_train)


def _run_stage(order: StageOrder, network: Callable[[], Network], act: Callable[[StageInputs], Trained]) -> Result:
    """Run a stage from its checkpoint if it has one; if the checkpoint does not fit, start over with a new network."""
    spec, start = order.spec, network()
    checkpoints = Checkpointing(
        order.store.checkpoints,
        spec.key,
        started_from=start.digest,
        data=start.data.digest,
        minutes=spec.location.get(spec.training, {}).get("checkpoint_minutes", 0),
        grace=order.worker.grace,
        environment=environment(),
    )
    try:
        return _finish(StageInputs.of(order, start, checkpoints), act)
    except Unfit as error:
        checkpoints.set_aside(str(error))
    with fitting(spec.inputs.get(RATES, spec.key), STATE, (Unfit,)):  # only the dense training's state can be unfit now
        return _finish(StageInputs.of(order, network(), checkpoints), act)


def _finish(stage: StageInputs, act: Callable[[StageInputs], Trained]) -> Result:
    """Run a stage's own work; measure and record the network that it leaves."""
    clock, done = StageClock(), act(stage)
    found = measure_all(stage, stage.other_network(DENSE))
    require_number(stage, found.final)
    return record(stage, done, found, clock)


def _train(stage: StageInputs) -> Trained:
    """Train the network as it is."""
    state = _begun(stage)
    _lead(stage)
    return Trained(_fit(stage, state))


def _prune_and_train(stage: StageInputs) -> Trained:
    """Prune the network, train it under the new masks, and check the result."""
    earlier, state, begun = stage.network.masks, _begun(stage), None
    if state is not None and BLOCKS in state.values:
        state, begun = None, state
    if state is not None:
        masks, before, scoring = _pruned_before(stage, state)
    elif stage.asked.prunes_first:
        masks, before, scoring = prune_now(stage, begun)
    else:
        masks, before, scoring = begin_unpruned(stage), {}, Scoring()
        restart(stage.network, masks, stage.order)
    stage.network.masks = masks
    held = {"masks": as_tensor(masks.to_bytes()), "before": dict(before), "scoring": scoring.held}
    stage.checkpoints.holds(held)
    _lead(stage)
    return checked(stage, earlier, _fit(stage, state), before, scoring)


def checked(
    stage: StageInputs,
    earlier: MaskSet,
    fit: FitResult,
    before: Mapping[str, float],
    scoring: Scoring,
    *,
    at_target: bool = True,
) -> Trained:
    """Check a pruned and trained network; return the round's result.

    Args:
        stage: the stage; its network gets the masks with which the training ended.
        earlier: masks before the round.
        fit: result of the training.
        before: metrics before fine-tuning.
        scoring: costs of scoring.
        at_target: whether masks that do not change must have the round's target sparsity.
    """
    asked, found, history = stage.asked, dict(scoring.details), {}
    chosen = pruning_rounds.chosen_weights(stage.model, stage.asked, stage.data)
    if (sparse := fit.sparse) is not None:
        stage.network.masks = sparse.masks if fit.masks is None else fit.masks
        found, at_target = found or sparse.scoring, fit.masks is not None
        history = {"mask_updates": sparse.updates}
    masks, weights = stage.network.masks, plain_state(stage.model)
    details = pruning_rounds.details(chosen.weights, asked, earlier, masks, weights, found, at_target=at_target)
    dense = considered(stage.model, [each.name for each in chosen.weights])
    details |= history | {"matrix_weights": dense.plain()}
    told = (
        *chosen.doubt,
        *untold(stage.model, dense, stage.spec.typed.prune, stage.asked.choices),
        *([found["limits"]] if "limits" in found else []),
    )
    return Trained(fit, before, details, scoring.seconds, told)


def _begun(stage: StageInputs) -> TrainState | None:
    """Return the state of the checkpoint, else of the furthest stage that this one may continue with equal bits."""
    checkpoints, starts = stage.checkpoints, stage.spec.starts_from
    if (state := checkpoints.latest()) is None and starts and not checkpoints.starts_over:
        state, checkpoints.seconds = furthest(stage.order.store, starts, stage.network.digest)
    return state


def _lead(stage: StageInputs) -> None:
    """Tell the other ranks of the trial, if there are any, that this stage trains now under the network's masks."""
    stage.ranks.say({"stage": stage.spec.key})
    stage.ranks.bytes_of_leader(stage.network.masks.to_bytes() if len(stage.network.masks) else b"")


def _pruned_before(stage: StageInputs, state: TrainState) -> Start:
    """Return the start of a training from its checkpoint; the weights are in the state that the training restores."""
    try:
        before, scoring = state.part("before"), Scoring(*map(dict, state.part("scoring")))
        return MaskSet.from_bytes(as_bytes(state.part("masks")), stage.model), before, scoring
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise Unfit(str(error)) from error


def prune_now(stage: StageInputs, begun: TrainState | None) -> Start:
    """Prune on top of the masks so far, from the checkpoint of a round that has pruned some of its blocks."""
    blocks = Blocks(after=partial(_after_block, stage))
    try:
        if begun is not None:
            blocks.restore(stage.model, begun)
    except ValueError as error:
        raise Unfit(str(error)) from error
    earlier = stage.network.masks
    masks, scoring = pruning_rounds.prune_round(stage.model, stage.asked.before_training, earlier, stage.read, blocks)
    if stage.is_small:  # the small network takes no weights from the pruned one
        return masks, {}, scoring
    restart(stage.network, masks, stage.order)
    return masks, before_training(stage, measure(stage, stage.data.val)), scoring


def before_training(stage: StageInputs, measured: Measured) -> dict[str, float]:
    """Return the metrics before fine-tuning; raise `LawBroken` if the loss of the pruned network is not finite."""
    blame = partial(require_finite, {"val": stage.data.val}, stage.config["eval_batch_size"], stage.device)
    pruning_rounds.hold_finite(measured.figures, stage.spec.training, blame)
    return {f"val/{name}": value for name, value in measured.figures.items() if math.isfinite(value)}


def begin_unpruned(stage: StageInputs) -> MaskSet:
    """Return the masks with which a training begins that prunes by itself: those so far, and ones elsewhere."""
    chosen = pruning_rounds.chosen_weights(stage.model, stage.asked, stage.data).weights
    return first_masks({each.name: each.module.get_parameter(each.parameter) for each in chosen}, stage.network.masks)


def _after_block(stage: StageInputs, blocks: Blocks) -> None:
    """Report the block, save a checkpoint if one is due, and end the pruning if the stage must end."""
    point = CurvePoint(blocks.number, 0.0, time.time(), {BLOCKS: blocks.total})
    stage.order.worker.report(stage.spec.key, point, stage.task.metrics[0])
    stage.keep_or_end(partial(blocks.state, stage.model))


def _fit(stage: StageInputs, state: TrainState | None) -> FitResult:
    """Train the network in its way, from a state if there is one."""

    def run(job: TrainingJob, masks: Sequence[Tensor | None] | None) -> FitResult:
        if job.state is None and masks is not None:
            job = replace(job, state=onward(job.model, masks, stage.spec, stage.order.store))
        return run_job(stage, job)

    return train_network(stage, stage.job(stage.other_network(TEACHER), state), run)


def run_job(stage: StageInputs, job: TrainingJob) -> FitResult:
    """Run a training on all ranks of the trial, by the built-in loop or by the user's own function."""
    job = replace(job, state=job.ranks.state_of_leader(job.state))
    own = job.config.get("_target_")
    if own is not None and job.until == 0:
        return FitResult((), 0, 0)
    if own is not None and job.until is not None:
        raise TrainingError(
            f"`{job.where}._target_` (={own}) must be null if a stage ends at a step of the training, because a "
            "training function decides itself when to end; pass null for the built-in loop."
        )
    cost = cost_of(job.model, job.data, job.device, job.masks, job.sparse) if job.cost is None else job.cost
    job = replace(job, cost=cost)
    if own is None:
        return training_loop.fit(job)
    job.ranks.weights_of_leader(job.model)
    return run_own_loop(job, partial(measure, stage.training(job), job.data.val))


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
    train_network(stage, stage.job(stage.other_network(TEACHER)), lambda job, _: run_job(stage, job))
