"""Run one stage: train the dense network, or prune and fine-tune one round. No Ray, no MLflow.

The result depends only on the stage's spec and on the network it starts from. That network is on its device already, or
it is restored from the store; both give the same bits.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from orchestrator.core.file_names import MASKS, STATE, STATE_VALUES, WEIGHTS
from orchestrator.core.records import BLOCKS, StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.seeding import derive
from orchestrator.core.specs import DENSE, NETWORK, RATES, TEACHER, StageSpec
from orchestrator.core.stage_kinds import KINDS, START
from orchestrator.core.work_order import FileWriter, Result, WorkOrder
from orchestrator.training import pruning_rounds
from orchestrator.training.dynamics.sparse_training import SparseTraining, first_masks
from orchestrator.training.dynamics.training_cost import TrainingCost, cost_of
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.own_loop import run_own_loop
from orchestrator.training.loop.steps import TrainingError, kept_gradients
from orchestrator.training.loop.training_job import FitResult, TrainingJob
from orchestrator.training.scoring.layer_by_layer import Blocks
from orchestrator.training.scoring.ranking import Read, Round, Scoring, example_of
from orchestrator.training.scoring.shared_statistics import source_of
from orchestrator.training.stage_networks import Network, fitting, initialised, restored
from orchestrator.training.state.checkpointing import Checkpointing
from orchestrator.training.state.from_scratch import Small, small_of, small_transformer_of, smaller_to_fit
from orchestrator.training.state.resuming import Unfit
from orchestrator.training.state.rewinding import furthest, masks_of
from orchestrator.training.state.stage_environment import environment
from orchestrator.training.state.train_state import TrainState, as_bytes, as_tensor
from orchestrator.training.ways import Ways
from orchestrator.workloads import model_building
from orchestrator.workloads.inspection import first, require_finite
from orchestrator.workloads.model_building import Prunable
from orchestrator.workloads.splits import Split
from orchestrator.workloads.tasks import task_building
from orchestrator.workloads.tasks.batch import arguments, moved
from orchestrator.workloads.tasks.distilled import with_teacher
from orchestrator.workloads.tasks.task import Measured, Task, TestInputs
from orchestrator.workloads.weight_files import plain_state, state_digest, write_state
from pruning import LowRankUpdates, MaskKeeper, MaskSet, remove_all
from pruning.choices.axes import TRANSFORMER_UNITS
from pruning.measure.macs import Macs, macs


def train_dense(spec: StageSpec, _inputs: Mapping[str, object], order: WorkOrder) -> Result:
    """Build a network and train it: a dense stage to the end; a start stage to its step, with its state as a result.

    Raises:
        training_loop.Cancelled: at a batch boundary, after `order.cancelled()` returned True.
        OrchestratorError: the user can fix the cause: a diverging loss, a target that cannot be built.
    """
    return _run_stage(spec, lambda: initialised(spec, spec, order), order, Stage.train)


def prune_and_finetune(spec: StageSpec, inputs: Mapping[str, object], order: WorkOrder) -> Result:
    """Prune the network in `inputs`, or else in the store, and fine-tune the pruned network.

    Raises:
        training_loop.Cancelled: at a batch boundary, after `order.cancelled()` returned True.
        OrchestratorError: the user can fix the cause: a diverging loss, a broken law, a target that cannot be built.
    """
    live = [network for network in (inputs.get(NETWORK),) if isinstance(network, Network)]
    return _run_stage(spec, lambda: live.pop() if live else restored(spec, order), order, Stage.prune)


def _run_stage(
    spec: StageSpec, network: Callable[[], Network], order: WorkOrder, act: Callable[[Stage], Trained]
) -> Result:
    """Run a stage from its checkpoint if it has one; if the checkpoint does not fit, start over with a new network."""
    start = network()
    checkpoints = Checkpointing(
        order.store.checkpoints,
        spec.key,
        started_from=start.digest,
        data=start.data.digest,
        minutes=spec.location.get(spec.training, {}).get("checkpoint_minutes", 0),
        grace=order.grace,
        environment=environment(),
    )
    try:
        return Stage(spec, start, order, checkpoints).result(act)
    except Unfit as error:
        checkpoints.set_aside(str(error))
    with fitting(spec.inputs.get(RATES, spec.key), STATE, (Unfit,)):  # only the dense training's state can be unfit now
        return Stage(spec, network(), order, checkpoints).result(act)


@dataclass(frozen=True)
class Trained:
    """Result of a stage's own work; a round adds metrics before fine-tuning, details, and seconds by what took them."""

    fit: FitResult
    before: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)


class Stage:
    """Run of one stage on a network: its training or pruning, its evaluation and its record."""

    def __init__(
        self,
        spec: StageSpec,
        network: Network,
        order: WorkOrder,
        checkpoints: Checkpointing | None = None,
        ways: Ways | None = None,
    ) -> None:
        torch.set_num_threads(order.threads)
        self._ways = ways or Ways()
        self.spec, self.network, self.order = spec, network, order
        self.model, self.data, self.device = network.model, network.data, torch.device(order.device)
        training, self.config = spec.training, spec.training_config
        task = task_building.build({**spec.typed.task, **spec.location.get("task", {})})
        self.task = task_building.with_loss(task, self.config["loss"], f"{training}.loss", self.device)
        self._checkpoints = checkpoints or Checkpointing(order.store.checkpoints, spec.key)
        self.is_small = spec.typed.restart.control == "small"
        self.sparse: SparseTraining | None = None
        """Masks that change within the training of the round."""
        self.pruned_all = True
        """Whether the round pruned all its layers; a rehearsal in the sequential order prunes the first block."""

    def result(self, act: Callable[[Stage], Trained]) -> Result:
        """Run `act`; return the stage's record, its files and its network."""
        started, clock, done = time.time(), time.perf_counter(), act(self)
        inputs = self._test_inputs()
        spec, network, final, count = self.spec, self.network, self._final_metrics(inputs), self._macs()
        continued = self._ways.generations(self, inputs)
        del inputs
        after = {f"{split}/{name}": value for split, found in final.items() for name, value in found.figures.items()}
        weights, earlier = plain_state(self.model), self._checkpoints.seconds
        files: dict[str, FileWriter] = {WEIGHTS: partial(write_state, weights)}
        if KINDS[spec.kind].prunes:
            masks = network.masks.to_bytes()
            files[MASKS] = lambda file: file.write(masks)
        if done.fit.state is not None:
            state = self._checkpoints.with_held(done.fit.state)
            values = json.dumps(state.values, allow_nan=False).encode()
            files |= {STATE: partial(write_state, state.tensors), STATE_VALUES: lambda file: file.write(values)}
        record = StageRecord(
            key=spec.key,
            kind=spec.kind,
            round=spec.round,
            before=done.before,
            after={name: value for name, value in after.items() if math.isfinite(value)},
            metrics=tuple(self.task.metrics),
            curve=done.fit.curve,
            requested_sparsity=spec.typed.target,
            sparsity=network.masks.sparsity(),
            tensor_sparsity=network.masks.sparsities(),
            tensor_sizes=network.masks.sizes(),
            parameters=sum(parameter.numel() for parameter in self.model.parameters()),
            macs=count.total,
            macs_remaining=count.remaining,
            weights_digest=state_digest(weights),
            mask_digest=network.masks.digest(),
            steps=done.fit.steps,
            best_step=done.fit.best_step,
            started=started - earlier,
            started_from=network.digest,
            data_digest=network.data.digest,
            details={
                **done.details,
                **({} if done.fit.cost is None else {"training_macs": done.fit.cost}),
                "measured": {split: dict(found.details) for split, found in final.items()},
                **({"generations": continued} if continued else {}),
            },
            measurements={"seconds": earlier + time.perf_counter() - clock, **done.seconds},
            warnings=(
                *self._checkpoints.warnings,
                *self._warn_if_random(),
                *(self.sparse.warnings if self.sparse is not None else ()),
                *(
                    f"every weight of {name} is pruned: no signal passes through it"
                    for name in done.details.get("dead_tensors", ())
                ),
                *(f"{name} is {value}" for name, value in after.items() if not math.isfinite(value)),
            ),
            device=str(self.device),
            host=socket.gethostname(),
            attempt=self.order.attempt,
            environment=environment(str(self.device)),
            spec=redact_tree(spec.to_json()),
        )
        return Result(record, files, replace(network, digest=record.weights_digest))

    def _warn_if_random(self) -> Iterator[str]:
        """Yield a warning if the network is a built-in model, dense, and neither trained nor loaded."""
        model, length = self.spec.typed.model if self.spec.kind == "dense" else {}, self.config
        untrained = not (length.get("epochs") or length.get("steps"))
        if untrained and model.get("kind") is not None and model.get("weights") is None:
            yield "the network is random: nothing was trained, and `model.weights` is null"

    def train(self) -> Trained:
        """Train the network as it is."""
        state = self._begun()
        self._lead(MaskSet({}))
        return Trained(self._train(state))

    def follow(self, masks: bytes) -> None:
        """Take part in the training of rank 0, with its masks."""
        self.network.masks = MaskSet.from_bytes(masks, self.model) if masks else MaskSet({})
        if KINDS[self.spec.kind].prunes:
            self._fit_under(self.network.masks, Round.of(self.spec.fields), None)
        else:
            self._train(None)

    def _lead(self, masks: MaskSet) -> None:
        """Tell the other ranks of the trial, if there are any, that this stage trains now under these masks."""
        if (ranks := self.order.ranks) is not None:
            ranks.say({"stage": self.spec.key})
            ranks.bytes_of_leader(masks.to_bytes() if len(masks) else b"")

    def _begun(self) -> TrainState | None:
        """Return the state of the checkpoint, else of the furthest stage that this one may continue with equal bits."""
        checkpoints, starts = self._checkpoints, self.spec.starts_from
        if (state := checkpoints.latest()) is None and starts and not checkpoints.starts_over:
            state, checkpoints.seconds = furthest(self.order.store, starts, self.network.digest)
        return state

    def prune(self) -> Trained:
        """Prune the network, fine-tune it under the new masks, and check the result."""
        spec, earlier, state = self.spec, self.network.masks, self._begun()
        asked, begun = Round.of(spec.fields), None
        if state is not None and BLOCKS in state.values:
            state, begun = None, state
        chosen = model_building.prunable(self.model, spec.typed.prune)
        if state is not None:
            masks, before, scoring = self._prune_result(state)
        elif asked.prunes_first:
            masks, before, scoring = self._prune_now(asked, earlier, begun)
        else:
            masks, before, scoring = self._begin_unpruned(chosen)
        self.network.masks = masks
        self._checkpoints.holds({"masks": as_tensor(masks.to_bytes()), "before": dict(before), "scoring": scoring.held})
        self._lead(masks)
        fit = self._fit_under(masks, asked, state)
        found, history, at_target = dict(scoring.details), {}, self.pruned_all
        if self.sparse is not None:
            self.network.masks = self.sparse.masks if fit.masks is None else fit.masks
            found, at_target = found or self.sparse.scoring, fit.masks is not None
            history = {"mask_updates": self.sparse.updates}
        masks, weights = self.network.masks, plain_state(self.model)
        details = pruning_rounds.details(chosen, asked, earlier, masks, weights, found, at_target=at_target)
        return Trained(fit, before, details | history, scoring.seconds)

    def _fit_under(self, masks: MaskSet, asked: Round, state: TrainState | None) -> FitResult:
        """Train the pruned network, or the small one that the masks leave, from a checkpoint if there is one."""
        if self.is_small:
            return self._ways.train(self, partial(self._fit_small, masks, state))
        in_order = masks_of(self.model, masks)
        example = partial(example_of, self.model, self.data)
        if (small := smaller_to_fit(self.spec, asked, self.model, masks, example)) is not None:
            return self._fit_inside(small, state)
        if asked.choices.dynamics.row.in_training:
            self.sparse = SparseTraining(asked, masks, self._read(), self.spec.training)
            return self._train(state or self._ways.onward(self, in_order))
        if self.config.get("lora_rank") is not None:
            return self._fit_low_rank(masks, state)
        if self.spec.typed.prune.holding == "hooks" and masks.sparsity():
            masks.apply(self.model)
            fit = self._train(state or self._ways.onward(self, in_order))
            remove_all(self.model)
            return fit
        keeper = MaskKeeper(self.model, masks, kept_gradients(self.config))
        fit = self._train(state or self._ways.onward(self, in_order), keeper)
        keeper.release()
        return fit

    def _fit_low_rank(self, masks: MaskSet, state: TrainState | None) -> FitResult:
        """Train low-rank updates of the pruned network's linear layers, and merge them into it."""
        config, cost = self.config, self._cost()
        pruning_rounds.masked(self.model, masks)
        draws = torch.Generator().manual_seed(derive(self.spec.typed.seed, f"{self.spec.round}/lora"))
        settings = (config["lora_rank"], config["lora_alpha"], config["lora_targets"])
        try:
            updates = LowRankUpdates(self.model, masks, *settings, draws)
        except ValueError as error:
            raise TrainingError(
                f"{str(error).replace('`targets`', '`finetune.lora_targets`')} Pass another pattern, or "
                "finetune.lora_rank=null."
            ) from error
        fit = self._train(state, cost=cost)
        updates.merge()
        return fit

    def _cost(self) -> TrainingCost:
        return cost_of(self.model, self.data, self.device, self.network.masks, self.sparse)

    def _begin_unpruned(self, chosen: Sequence[Prunable]) -> tuple[MaskSet, dict[str, float], Scoring]:
        """Return the result of `_prune_now` for a round whose training prunes: the masks so far, and no figures."""
        whole = {each.name: each.module.get_parameter(each.parameter) for each in chosen}
        masks = first_masks(whole, self.network.masks)
        self._ways.restart(self, masks)
        return masks, {}, Scoring()

    def _read(self) -> Read:
        """Return the data and the task that scores read."""
        order = torch.Generator().manual_seed(derive(self.spec.typed.seed, f"{self.spec.round}/shuffle"))
        source = source_of(self.spec, self.network.digest, self.data.digest, self.device)
        return Read(self.data, self.task, order, source)

    def keep_or_end(self, current: Callable[[], TrainState]) -> None:
        """Save the state if a checkpoint is due; raise `Cancelled` if the stage must end."""
        ending = self.order.cancelled()
        self._checkpoints.keep(current, ending)
        if ending:
            raise training_loop.Cancelled

    def _prune_now(
        self, asked: Round, earlier: MaskSet, begun: TrainState | None
    ) -> tuple[MaskSet, dict[str, float], Scoring]:
        """Prune on top of the masks so far; return the new masks, metrics before fine-tuning, and scoring costs."""
        blocks = Blocks(after=partial(self._ways.after_block, self))
        try:
            if begun is not None:
                blocks.restore(self.model, begun)
        except ValueError as error:
            raise Unfit(str(error)) from error
        masks, scoring = pruning_rounds.prune_round(self.model, asked.before_training, earlier, self._read(), blocks)
        if self.is_small:  # the small network takes no weights from the pruned one
            return masks, {}, scoring
        self._ways.restart(self, masks)
        before = self.measured(self.data.val).figures
        blame = partial(require_finite, {"val": self.data.val}, self.config["eval_batch_size"], self.device)
        pruning_rounds.hold_finite(before, self.spec.training, blame)
        return masks, {f"val/{name}": value for name, value in before.items() if math.isfinite(value)}, scoring

    def _fit_small(self, masks: MaskSet, state: TrainState | None) -> FitResult:
        """Train the small dense network that the masks leave, with new weights, and copy it into the whole one."""
        seed = derive(self.spec.typed.seed, f"{self.spec.round}/small")
        make = small_transformer_of if self.spec.typed.unit.kind in TRANSFORMER_UNITS else small_of
        return self._fit_inside(make(self.model, masks, example_of(self.model, self.data), seed), state)

    def _fit_inside(self, small: Small, state: TrainState | None) -> FitResult:
        """Train a smaller network in the place of the whole one, and copy it into that."""
        whole, network, cost = self.model, self.network, None if self.is_small else self._cost()
        self.model, self.network = small.model, replace(network, model=small.model, masks=MaskSet({}))
        masks_in_order = [None for each in small.model.parameters() if each.requires_grad]
        fit = self._train(state or self._ways.onward(self, masks_in_order), cost=cost)
        self.model, self.network = whole, network
        small.put_into(whole)
        return fit

    def _prune_result(self, state: TrainState) -> tuple[MaskSet, dict[str, float], Scoring]:
        """Return the result of `_prune_now` from a checkpoint; the weights are in the state that `_fit` restores."""
        try:
            before, scoring = state.part("before"), Scoring(*map(dict, state.part("scoring")))
            return MaskSet.from_bytes(as_bytes(state.part("masks")), self.model), before, scoring
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise Unfit(str(error)) from error

    def _train(
        self, state: TrainState | None, keeper: MaskKeeper | None = None, cost: TrainingCost | None = None
    ) -> FitResult:
        return self._ways.train(self, lambda: self._fit(state, keeper, cost))

    def _fit(self, state: TrainState | None, keeper: MaskKeeper | None, cost: TrainingCost | None) -> FitResult:
        spec, order, config = self.spec, self.order, self.config
        where, until, own = spec.training, spec.typed.until, config.get("_target_") is not None
        if order.ranks is not None:
            state = order.ranks.state_of_leader(state)
        if own and until == 0:
            return FitResult((), 0, 0)
        if own and until is not None:
            raise TrainingError(
                f"`{where}._target_` (={config['_target_']}) must be null if a stage ends at a step of the training, "
                "because a training function decides itself when to end; pass null for the built-in loop."
            )
        job = TrainingJob(
            model=self.model,
            data=self.data,
            task=self._task_with_teacher(),
            config=config,
            seed=derive(spec.typed.seed, f"{spec.round if where == 'finetune' else 0}/fit"),
            device=self.device,
            where=where,
            masks=self.network.masks,
            on_optimizer=None if keeper is None else keeper.attach,
            cancelled=order.cancelled,
            on_point=lambda point: order.report(spec.key, point, self.task.metrics[0]),
            state=state,
            keep=self._checkpoints.keep,
            since=spec.typed.restart.rates or 0,
            until=until,
            selects=spec.kind != START,
            cost=cost or self._cost(),
            sparse=self.sparse,
            ranks=order.ranks,
        )
        if not own:
            return training_loop.fit(job)
        if order.ranks is not None:
            order.ranks.weights_of_leader(self.model)
        return run_own_loop(job, partial(self.measured, self.data.val))

    def _task_with_teacher(self) -> Task:
        """Return the task; with the stage's teacher, its loss includes the distillation loss."""
        teacher, config = self._ways.other_network(self, TEACHER), self.config
        if teacher is None:
            return self.task
        weight, temperature = config["teacher_weight"], config["teacher_temperature"]
        return with_teacher(self.task, teacher, weight, temperature, named=config["teacher"])

    def _test_inputs(self) -> TestInputs:
        """Return the inputs of the measurements on test splits, with the dense network if the stage has it."""
        length = self.data.input_shape[0] if self.data.input_shape else 0
        dense, codec = self._ways.other_network(self, DENSE), self.data.codec
        return TestInputs(self.device, length, dense, codec, batch_size=self.config["eval_batch_size"])

    def _final_metrics(self, inputs: TestInputs) -> dict[str, Measured]:
        """Return the metrics of the selected weights by split; only this function evaluates on the test splits."""
        found = {"val": self.measured(self.data.val)}
        if KINDS[self.spec.kind].reads_test:
            tests = {"test": "test", **{f"test_{name}": f"{name} test" for name in self.data.tests}}
            found |= {at: self._tested(split, replace(inputs, further=at != "test")) for at, split in tests.items()}
        return found

    def _tested(self, name: str, inputs: TestInputs) -> Measured:
        """Return what the network achieves on a test split; raise `DataError` for data that are not finite."""
        split = self.data.splits[name]
        found = self._ways.measure(self, split, inputs)
        if not math.isfinite(loss := found.figures.get("loss", 0.0)):
            require_finite({name: split}, self.config["eval_batch_size"], self.device, f"the {name} loss is {loss}")
        return found

    def measured(self, split: Split) -> Measured:
        """Return the current metrics of the network on a split."""
        return self._ways.measure(self, split)

    def _macs(self) -> Macs:
        example = moved(first(self.data.train), self.device)  # a real example, because tokens are integers
        given, named = arguments(self.model, example, labels=False)
        return macs(self.model, named or given, self.network.masks)
