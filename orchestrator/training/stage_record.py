"""Inputs of a stage, and what it leaves: the measurement and record of a finished stage, and the files to commit."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Self

import torch
from torch import nn

from orchestrator.core.file_names import MASKS, STATE, STATE_VALUES, WEIGHTS
from orchestrator.core.records import StageRecord
from orchestrator.core.redact import redact_tree
from orchestrator.core.seeding import derive
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import FileWriter, Result, StageOrder
from orchestrator.training.loop.evaluation import evaluate, generated
from orchestrator.training.loop.training_job import FitResult, TrainingError, TrainingJob
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.scoring.examples import source_of
from orchestrator.training.scoring.ranking import Read, Round
from orchestrator.training.stage_networks import Network, stored
from orchestrator.training.state.checkpointing import Checkpointing, environment
from orchestrator.training.state.train_state import TrainState
from orchestrator.training.team.ranks import ALONE, Processes
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.inspection import first, require_finite
from orchestrator.workloads.splits import Split
from orchestrator.workloads.tasks import task_building
from orchestrator.workloads.tasks.batch import arguments, moved
from orchestrator.workloads.tasks.distilled import with_teacher
from orchestrator.workloads.tasks.task import Measured, Task, TestInputs
from orchestrator.workloads.weight_files import plain_state, state_digest, write_state
from pruning.measure.macs import Macs, macs
from pruning.measure.report import active_parameters
from pruning.mixtures.finding import mixtures


@dataclass(frozen=True)
class StageInputs:
    """Inputs of a stage's steps, which train and prune the network in place, and set its masks."""

    order: StageOrder
    network: Network
    task: Task
    """The task, with the loss of this stage's training."""
    checkpoints: Checkpointing

    @classmethod
    def of(cls, order: StageOrder, network: Network, checkpoints: Checkpointing | None = None) -> Self:
        """Build the task; without `checkpoints`, none is saved."""
        spec = order.spec
        torch.set_num_threads(order.worker.threads)
        task = task_building.build({**spec.typed.task, **spec.location.get("task", {})})
        loss, device = spec.training_config["loss"], torch.device(order.worker.device)
        task = task_building.with_loss(task, loss, f"{spec.training}.loss", device)
        return cls(order, network, task, checkpoints or Checkpointing(order.store.checkpoints, spec.key))

    @property
    def spec(self) -> StageSpec:
        """The stage's spec."""
        return self.order.spec

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.network.model

    @property
    def data(self) -> Data:
        """The data set."""
        return self.network.data

    @property
    def config(self) -> Mapping[str, Any]:
        """Plain configuration of the training."""
        return self.spec.training_config

    @property
    def device(self) -> torch.device:
        """Where the network is."""
        return torch.device(self.order.worker.device)

    @property
    def ranks(self) -> Processes:
        """Processes of the trial."""
        return self.order.worker.ranks or ALONE

    @cached_property
    def asked(self) -> Round:
        """The round, for a stage that prunes."""
        return Round.of(self.spec.typed)

    @property
    def is_small(self) -> bool:
        """Whether the stage trains a small network anew, as a control."""
        return self.spec.typed.restart.control_row.small

    @property
    def read(self) -> Read:
        """Data and task that scores read."""
        order = torch.Generator().manual_seed(derive(self.spec.typed.seed, f"{self.spec.round}/shuffle"))
        source = source_of(self.spec, self.network.digest, self.data.digest, self.device)
        return Read(self.data, self.task, order, source)

    def job(self, teacher: nn.Module | None, state: TrainState | None = None) -> TrainingJob:
        """Return the training of the whole network, with the loss of a teacher if there is one."""
        spec, order, config, task = self.spec, self.order, self.config, self.task
        if teacher is not None:
            weight, temperature = config["teacher_weight"], config["teacher_temperature"]
            task = with_teacher(task, teacher, weight, temperature, named=config["teacher"])
        return TrainingJob(
            model=self.model,
            data=self.data,
            task=task,
            config=config,
            seed=derive(spec.typed.seed, f"{spec.round if spec.training == 'finetune' else 0}/fit"),
            device=self.device,
            where=spec.training,
            masks=self.network.masks,
            cancelled=order.cancelled,
            on_point=lambda point: order.worker.report(spec.key, point, self.task.metrics[0]),
            state=state,
            keep=self.checkpoints.keep,
            since=spec.typed.restart.rates or 0,
            until=spec.typed.until,
            selects=KINDS[spec.kind].validates,
            ranks=self.ranks,
        )

    def training(self, job: TrainingJob) -> StageInputs:
        """Return these inputs with the network that a job trains, which may be a smaller one."""
        return replace(self, network=replace(self.network, model=job.model, masks=job.masks))

    def keep_or_end(self, current: Callable[[], TrainState]) -> None:
        """Save the state if a checkpoint is due; raise `Cancelled` if the stage must end."""
        ending = self.order.cancelled()
        self.checkpoints.keep(current, ending)
        if ending:
            raise Cancelled

    def other_network(self, role: str) -> nn.Module | None:
        """Return the network of the input with this role, in evaluation mode and frozen; None without the input."""
        key = self.spec.inputs.get(role)
        return None if key is None else stored(key, self.order)[0].model.eval().requires_grad_(False)


Measure = Callable[[StageInputs, Split, TestInputs | None], Measured]


@dataclass(frozen=True)
class Measurements:
    """Measurements of a finished network."""

    final: Mapping[str, Measured]
    """Metrics of the selected weights by split."""
    generations: list[dict[str, str]]
    """Continuations of the task's prompts."""
    macs: Macs


def measure(stage: StageInputs, split: Split, inputs: TestInputs | None = None) -> Measured:
    """Return the metrics of the network on a split; with `inputs`, on a test split."""
    sizes = {"batch_size": stage.config["eval_batch_size"], "precision": stage.config["precision"]}
    return evaluate(stage.model, split, stage.task, device=stage.device, **sizes, inputs=inputs)


def measure_all(
    stage: StageInputs, dense: nn.Module | None, measured: Measure = measure, most_tokens: int | None = None
) -> Measurements:
    """Measure a finished network; only this function evaluates on the test splits.

    Args:
        stage: the stage.
        dense: its dense network, if it has one to compare with.
        measured: measures a split.
        most_tokens: largest number of tokens of a continuation; None: as many as the task asks for.
    """
    length = stage.data.input_shape[0] if stage.data.input_shape else 0
    size = stage.config["eval_batch_size"]
    inputs = TestInputs(stage.device, length, dense, stage.data.codec, batch_size=size)
    final = {"val": measured(stage, stage.data.val, None)}
    if KINDS[stage.spec.kind].reads_test:
        for name in ("test", *(f"{name} test" for name in stage.data.tests)):
            at = "test" if name == "test" else f"test_{name.removesuffix(' test')}"
            final[at] = _tested(stage, name, replace(inputs, further=at != "test"), measured)
    count = _macs(stage)
    few = inputs if most_tokens is None else replace(inputs, most_tokens=most_tokens)
    return Measurements(final, generated(stage.model, stage.task, few, stage.config["precision"]), count)


def _tested(stage: StageInputs, name: str, inputs: TestInputs, measured: Measure) -> Measured:
    """Return what the network achieves on a test split; raise `DataError` for data that are not finite."""
    split = stage.data.splits[name]
    found = measured(stage, split, inputs)
    if not math.isfinite(loss := found.figures.get("loss", 0.0)):
        require_finite({name: split}, stage.config["eval_batch_size"], stage.device, f"the {name} loss is {loss}")
    return found


def require_number(stage: StageInputs, final: Mapping[str, Measured]) -> None:
    """Raise `TrainingError` if the primary metric of a split is NaN, although its loss is finite."""
    name = stage.task.metrics[0].name
    for split, found in final.items():
        if math.isnan(found.figures[name]) and math.isfinite(found.figures["loss"]):
            raise TrainingError(
                f"`task` (={type(stage.task).__name__}) gives NaN as {name}, its primary metric, of the {split} split, "
                "while the loss is finite; return a number from `measure`, or make another metric the first."
            )


def _macs(stage: StageInputs) -> Macs:
    example = moved(first(stage.data.train), stage.device)  # a real example, because tokens are integers
    given, named = arguments(stage.model, example, labels=False)
    return macs(stage.model, named or given, stage.network.masks)


@dataclass(frozen=True)
class Trained:
    """Result of a stage's own work; a round adds metrics before fine-tuning, details, seconds and warnings."""

    fit: FitResult
    before: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class StageClock:
    """When a stage began."""

    started: float = field(default_factory=time.time)
    ticks: float = field(default_factory=time.perf_counter)


def record(stage: StageInputs, done: Trained, found: Measurements, clock: StageClock) -> Result:
    """Return a finished stage's record, its files and its network."""
    spec, network, fit = stage.spec, stage.network, done.fit
    after = {f"{split}/{name}": value for split, each in found.final.items() for name, value in each.figures.items()}
    weights, earlier = plain_state(stage.model), stage.checkpoints.seconds
    made = StageRecord(
        key=spec.key,
        kind=spec.kind,
        round=spec.round,
        before=done.before,
        after={name: value for name, value in after.items() if math.isfinite(value)},
        metrics=tuple(stage.task.metrics),
        curve=fit.curve,
        requested_sparsity=spec.typed.target,
        sparsity=network.masks.sparsity(),
        tensor_sparsity=network.masks.sparsities(),
        tensor_sizes=network.masks.sizes(),
        parameters=sum(parameter.numel() for parameter in stage.model.parameters()),
        macs=found.macs.total,
        macs_remaining=found.macs.remaining,
        weights_digest=state_digest(weights),
        mask_digest=network.masks.digest(),
        steps=fit.steps,
        best_step=fit.best_step,
        started=clock.started - earlier,
        started_from=network.digest,
        data_digest=network.data.digest,
        details={
            **done.details,
            **({} if fit.cost is None else {"training_macs": fit.cost}),
            "measured": {split: dict(each.details) for split, each in found.final.items()},
            **({"generations": found.generations} if found.generations else {}),
            **({"active_parameters": active_parameters(stage.model, network.masks)} if mixtures(stage.model) else {}),
            **({} if spec.parent or network.data.shared is None else {"shared_examples": network.data.shared}),
        },
        measurements={"seconds": earlier + time.perf_counter() - clock.ticks, **done.seconds},
        warnings=tuple(_warnings(stage, done, after)),
        device=str(stage.device),
        host=socket.gethostname(),
        attempt=stage.order.attempt,
        environment=environment(str(stage.device)),
        spec=redact_tree(spec.to_json()),
    )
    return Result(made, _files(stage, fit, weights), replace(network, digest=made.weights_digest))


def _files(stage: StageInputs, fit: FitResult, weights: Mapping[str, Any]) -> dict[str, FileWriter]:
    files: dict[str, FileWriter] = {WEIGHTS: partial(write_state, weights)}
    if KINDS[stage.spec.kind].prunes:
        masks = stage.network.masks.to_bytes()
        files[MASKS] = lambda file: file.write(masks)
    if fit.state is not None:
        state = stage.checkpoints.with_held(fit.state)
        values = json.dumps(state.values, allow_nan=False).encode()
        files |= {STATE: partial(write_state, state.tensors), STATE_VALUES: lambda file: file.write(values)}
    return files


def _warnings(stage: StageInputs, done: Trained, after: Mapping[str, float]) -> Iterator[str]:
    yield from stage.checkpoints.warnings
    first = stage.spec.parent is None and KINDS[stage.spec.kind].validates
    model = stage.spec.typed.model if first else {}
    untrained = not (stage.config.get("epochs") or stage.config.get("steps"))
    if untrained and model.get("kind") is not None and model.get("weights") is None:
        yield "the network is random: nothing was trained, and `model.weights` is null"
    if first and (shared := stage.network.data.shared):
        yield f"{shared:,} of {len(stage.data.test):,} test examples are training or validation examples, too"
    if done.fit.sparse is not None:
        yield from done.fit.sparse.warnings
    for name in done.details.get("dead_tensors", ()):
        yield f"every weight of {name} is pruned: no signal passes through it"
    yield from done.warnings
    for name, value in after.items():
        if not math.isfinite(value):
            yield f"{name} is {value}"


def begin(order: StageOrder) -> float:
    """Set torch's number of threads, and return the time in Unix seconds."""
    torch.set_num_threads(order.worker.threads)
    return time.time()


def reading_record(above: StageRecord, order: StageOrder, begun: float) -> StageRecord:
    """Return the record of a stage that trains nothing: it describes the network of `above`, without metrics."""
    return replace(
        above,
        key=order.spec.key,
        kind=order.spec.kind,
        before={},
        after={},
        curve=(),
        steps=0,
        best_step=0,
        started=begun,
        started_from=above.weights_digest,
        details={},
        warnings=(),
        device=order.worker.device,
        host=socket.gethostname(),
        attempt=order.attempt,
        environment=environment(order.worker.device),
        files={},
        spec=redact_tree(order.spec.to_json()),
    )


def timed(record: StageRecord, figures: Mapping[str, float]) -> StageRecord:
    """Return the record with the seconds since the stage started, and further measurements."""
    return replace(record, measurements={"seconds": max(0.0, time.time() - record.started), **figures})
