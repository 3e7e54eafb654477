"""A training as a value, its result, and its steps: optimizer, scheduler, loss scaler, gradients, batches, averages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.config.training import Train
from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.core.records import CurvePoint
from orchestrator.core.work_order import never
from orchestrator.training.loop.sparse_training import SparseTraining, TrainingCost
from orchestrator.training.state.train_state import TrainState
from orchestrator.training.team.ranks import ALONE, Processes
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.inspection import spoilt
from orchestrator.workloads.splits import Batch, Batches, index_of
from orchestrator.workloads.targets import create
from orchestrator.workloads.tasks.task import Task
from pruning import MaskSet
from pruning.scores.readings.network import batch_norms

Keep = Callable[[Callable[[], TrainState], bool], object]
"""Called before each batch with a function that returns the current state, and with whether the training is ending."""


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """One training, by the built-in loop or by a training function of the user's own."""

    model: nn.Module
    data: Data
    """Data, whose training and validation splits are used."""
    task: Task
    """Task with the loss of this training."""
    config: Mapping[str, Any]
    """A plain `orchestrator.config.training.Train`; absent keys have their defaults."""
    seed: int
    """Decides all random draws."""
    device: torch.device
    where: str = "train"
    """The place of `config` in the configuration, for errors: `train` or `finetune`."""
    masks: MaskSet = field(default_factory=lambda: MaskSet({}))
    """The network's masks when the training begins; empty while it is dense."""
    on_optimizer: Callable[[Optimizer], None] | None = None
    """Called with each optimizer before its first step, to attach hooks that keep the masks in force."""
    cancelled: Callable[[], bool] = never
    """Returns whether the training must end; called before each batch."""
    on_point: Callable[[CurvePoint], object] = lambda _: None
    """Called with each point of the curve as soon as it exists."""
    state: TrainState | None = None
    """State to resume from, which `keep` received from a training of the same network, data, settings and seed."""
    keep: Keep = lambda *_: None
    """Saves checkpoints. Training changes the state's tensors: write them before `keep` returns."""
    since: int | str = 0
    """Step, or epochs as in "2.5ep", at which this training begins and counts from; at most the step of `state`."""
    until: int | str | None = None
    """Place to end at, in the schedule of the whole training; the state at that place is part of the result."""
    selects: bool = True
    """Whether the model gets the selected weights, as if the training ended here; otherwise it keeps those of the last
    step. A state has tensors of its own if the model gets other weights."""
    cost: TrainingCost | None = None
    """Counts the multiply-accumulates of each step; None: nothing is counted."""
    sparse: SparseTraining | None = None
    """Masks that change within the training; they are attached, and released in the end. None: masks stay."""
    ranks: Processes = ALONE
    """Processes of the trial, each of which runs the job."""


@dataclass(frozen=True)
class FitResult:
    """Result of a training; the weights are in the model."""

    curve: tuple[CurvePoint, ...]
    steps: int
    """Number of optimizer steps, counted from where the training began."""
    best_step: int
    """Step whose weights the model has now; 0 if it is none of `steps`."""
    state: TrainState | None = None
    """Final state of a training that ends at a given place, else None."""
    cost: Mapping[str, Mapping[str, int]] | None = None
    """Multiply-accumulates by phase, as `TrainingCost.state` returns them; None if unknown."""
    masks: MaskSet | None = None
    """Masks of the weights that the model has now, if masks changed within the training and are at their target."""
    sparse: SparseTraining | None = None
    """Masks that changed within the training."""


ELEMENTWISE = frozenset(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "RMSprop"))
"""Optimizers that move each entry by its own gradients alone."""


class TrainingError(OrchestratorError):
    """Training that its configuration, device or data do not allow."""

    repeats = True


class Diverged(OrchestratorError):
    """Training whose loss is infinite or NaN."""

    repeats = True


def scaler_of(precision: str, device: torch.device, where: str) -> GradScaler:
    """Create the loss scaler for fp16; raise `TrainingError` if the device does not support the precision."""
    if precision == "fp16" and device.type != "cuda":
        raise TrainingError(
            f"`{where}.precision` (=fp16) must be fp32 or bf16 on {device.type}, because fp16 needs CUDA; pass bf16 or "
            "cluster.gpus_per_trial=1."
        )
    return GradScaler(device.type, enabled=precision == "fp16")


def optimizer_of(config: Train, parameters: Sequence[nn.Parameter], where: str) -> Optimizer:
    """Create the optimizer; raise `TrainingError` if its step computes the gradients itself."""
    optimizer: Optimizer = create(f"{where}.optimizer", config.optimizer, parameters)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TrainingError(
            f"`{where}.optimizer` (={type(optimizer).__name__}) must take a step without a closure, because "
            "gradients are computed once a step; pass torch.optim.SGD or torch.optim.Adam."
        )
    return optimizer


def scheduler_of(config: Train, optimizer: Optimizer, length: int, epoch_length: int, where: str) -> LRScheduler | None:
    """Create the scheduler; null T_max, total_steps and total_iters become its number of steps.

    Args:
        config: the training.
        optimizer: the optimizer of the training.
        length: length of the training in optimizer steps.
        epoch_length: length of an epoch in optimizer steps.
        where: the training's place in the configuration, for errors.
    """
    if config.scheduler is None:
        return None
    if config.scheduler_interval == "epoch":
        length = -(-length // max(epoch_length, 1))
    lengths = {"T_max", "total_steps", "total_iters"}
    node = {
        key: max(length, 1) if key in lengths and value is None else value for key, value in config.scheduler.items()
    }
    scheduler: LRScheduler = create(f"{where}.scheduler", node, optimizer)
    return scheduler


@dataclass(frozen=True)
class Steps:
    """Optimizer steps of an epoch, with `accumulate` batches each; the last step takes the remaining batches."""

    batches: Batches
    accumulate: int
    searched: Batches | None = None
    """Whole batches, to search for examples with NaN or infinity; None: `batches` are whole."""

    def __len__(self) -> int:
        return -(-len(self.batches) // self.accumulate)

    def at(self, place: int | str) -> int:
        """Return the step of a place in the training: a step, or a number of epochs as in 2.5ep."""
        return place if isinstance(place, int) else round(float(place.removesuffix("ep")) * len(self))

    def after(self, step: int) -> Iterator[Sequence[Batch]]:
        """Yield the batches of every step after the first `step` steps, epoch after epoch without end."""
        epoch, start = divmod(step, len(self))
        for number in count(epoch):
            batches = self.batches.epoch(number, start * self.accumulate)
            while together := list(islice(batches, self.accumulate)):
                yield together
            start = 0

    def require_finite(self, step: int, said: str) -> None:
        """Raise `DataError`, with a text that begins with `said`, if a step has read an example with NaN or infinity.

        The batches of the step before are searched, too: their gradients may have spoilt the weights.
        """
        for before in range(step - 1, max(step - 3, -1), -1):
            epoch, start = divmod(before, len(self))
            first, batches = start * self.accumulate, self.searched or self.batches
            for number, batch in enumerate(islice(batches.epoch(epoch, first), self.accumulate), first):
                if found := spoilt(batch):
                    index = index_of(batches, epoch, number, found.index or 0)
                    raise DataError(f"{said}: {replace(found, index=index).refusal('train')}")


class Gradients:
    """Changes to the gradients of a step before the optimizer uses them: add the penalty, then clip the norm.

        gradient of gamma <- gradient of gamma + penalty sign(gamma)        (gamma: the scales of BatchNorm)

    Scales without a gradient, because the step did not reach them, stay unchanged.

    Raises:
        TrainingError: there is a penalty, but no BatchNorm with trained scales.
    """

    def __init__(self, config: Train, model: nn.Module, parameters: Sequence[nn.Parameter], where: str) -> None:
        self._parameters, self._clip_norm, self._penalty = parameters, config.clip_norm, config.penalty
        self._scales: dict[nn.Parameter, nn.Module] = {}
        if config.penalty:
            held = {_parameter(module): module for module in batch_norms(model).values()}
            self._scales = {scale: module for scale, module in held.items() if scale.requires_grad}
            if not self._scales:
                raise TrainingError(
                    f"`{where}.penalty` (={config.penalty}) must be 0 for a network without trained BatchNorm "
                    "scales, which the penalty needs; pass train.penalty=0 finetune.penalty=0, or another model."
                )

    def finish(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Add the penalty and clip, once a step, after the backward passes of all its batches."""
        if self._scales or self._clip_norm is not None:
            scaler.unscale_(optimizer)
        with torch.no_grad():
            for scale, module in self._scales.items():
                if scale.grad is not None:
                    scale.grad.add_(cast(Tensor, module.weight).sign(), alpha=self._penalty)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)


def kept_gradients(config: Mapping[str, Any]) -> Literal["masked", "dense"]:
    """Return how `MaskKeeper` treats gradients: "dense" is faster, and bit-equal if no entry moves another."""
    known = config.get("clip_norm") is None and config.get("_target_") is None
    alone = known and config["optimizer"]["_target_"] in ELEMENTWISE
    return "dense" if alone else "masked"


def _parameter(module: nn.Module) -> nn.Parameter:
    """Return the parameter behind a module's `weight`; torch's pruning stores it as `weight_orig`."""
    return module.get_parameter("weight_orig" if "weight_orig" in module._parameters else "weight")


class Averages:
    """Exponential moving averages of parameters: average <- decay average + (1 - decay) parameter.

    The averages start from the parameters after the first step, so the initialisation has no part in them. An entry
    that is 0 after every step is 0 in the averages.

    Args:
        parameters: the trained parameters.
        decay: in (0, 1).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.values: list[Tensor] = []
        """One average per parameter, in their order; empty before the first step."""

    @torch.no_grad()
    def update(self) -> None:
        """Update the averages with the current parameters."""
        if self.values:
            torch._foreach_lerp_(self.values, list(self._parameters), 1 - self._decay)
        else:
            self.values = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Replace the parameters by the averages inside the context."""
        held = [parameter.detach().clone() for parameter in self._parameters]
        self.apply()
        try:
            yield
        finally:
            self._assign(held)

    def apply(self) -> None:
        """Replace the parameters by the averages."""
        self._assign(self.values)

    @torch.no_grad()
    def _assign(self, values: Sequence[Tensor]) -> None:
        if values:
            torch._foreach_copy_(list(self._parameters), list(values))
