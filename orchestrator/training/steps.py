"""A training's steps: what takes them, by which schedule and gradients, of how many batches; averages over them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.config.parts.training import Train
from orchestrator.core.errors import DataError, OrchestratorError
from orchestrator.workloads.inspection import spoilt
from orchestrator.workloads.splits import Batch, Batches, index_of
from orchestrator.workloads.targets import create
from pruning.scores.readings.network import batch_norms

ELEMENTWISE = frozenset(f"torch.optim.{name}" for name in ("SGD", "Adam", "AdamW", "RMSprop"))
"""Optimizers that move each entry by its own gradients alone."""


class TrainingError(OrchestratorError):
    """A training that its configuration, device or data does not allow."""

    repeats = True


class Diverged(OrchestratorError):
    """The loss is not finite any more."""

    repeats = True


def scaler_of(precision: str, device: torch.device, where: str) -> GradScaler:
    """Create what scales the losses of fp16; raise `TrainingError` for a precision that a device has not."""
    if precision == "fp16" and device.type != "cuda":
        raise TrainingError(
            f"`{where}.precision` (=fp16) must be fp32 or bf16 on {device.type}: fp16 needs CUDA; pass bf16 or "
            "cluster.gpus_per_trial=1."
        )
    return GradScaler(device.type, enabled=precision == "fp16")


def optimizer_of(config: Train, parameters: Sequence[nn.Parameter], where: str) -> Optimizer:
    """Create the optimizer; raise `TrainingError` for one that computes gradients itself."""
    optimizer: Optimizer = create(f"{where}.optimizer", config.optimizer, parameters)
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TrainingError(
            f"`{where}.optimizer` (={type(optimizer).__name__}) must take its step without a closure: the gradients of "
            "a trial are computed once a step; pass torch.optim.SGD or torch.optim.Adam."
        )
    return optimizer


def scheduler_of(config: Train, optimizer: Optimizer, length: int, epoch_length: int, where: str) -> LRScheduler | None:
    """Create the scheduler; a null T_max, total_steps or total_iters becomes the number of its steps.

    Args:
        length: of the training, in optimizer steps.
        epoch_length: the same of an epoch.
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
    """The optimizer steps of an epoch, `accumulate` batches each; the last one takes what is left."""

    batches: Batches
    accumulate: int

    def __len__(self) -> int:
        return -(-len(self.batches) // self.accumulate)

    def at(self, place: int | str) -> int:
        """Return the step of a place in the training: itself, or that after so many epochs, as in 2.5ep."""
        return place if isinstance(place, int) else round(float(place.removesuffix("ep")) * len(self))

    def after(self, step: int) -> Iterator[Sequence[Batch]]:
        """Yield the batches of each step of all epochs after the first `step` ones."""
        epoch, start = divmod(step, len(self))
        for number in count(epoch):
            batches = self.batches.epoch(number, start * self.accumulate)
            while together := list(islice(batches, self.accumulate)):
                yield together
            start = 0

    def require_finite(self, step: int, said: str) -> None:
        """Raise `DataError`, which begins with `said`, for an example with NaN or an infinity that a step has read.

        The step before is searched too: its gradients may have spoilt the weights.
        """
        for before in range(step - 1, max(step - 3, -1), -1):
            epoch, start = divmod(before, len(self))
            first = start * self.accumulate
            for number, batch in enumerate(islice(self.batches.epoch(epoch, first), self.accumulate), first):
                if found := spoilt(batch):
                    index = index_of(self.batches, epoch, number, found.index or 0)
                    raise DataError(f"{said}: {replace(found, index=index).refusal('train')}")


class Gradients:
    """Does to a step's gradients what its optimizer is to see: the penalty is added, then all are clipped.

        gradient of gamma <- gradient of gamma + penalty sign(gamma)        (gamma: the scales of BatchNorm)

    Scales without a gradient, which the step has not reached, stay as they are.

    Raises:
        TrainingError: there is a penalty, and no BatchNorm whose scales are trained.
    """

    def __init__(self, config: Train, model: nn.Module, parameters: Sequence[nn.Parameter], where: str) -> None:
        self._parameters, self._clip_norm, self._penalty = parameters, config.clip_norm, config.penalty
        self._scales: dict[nn.Parameter, nn.Module] = {}
        if config.penalty:
            held = {_parameter(module): module for module in batch_norms(model).values()}
            self._scales = {scale: module for scale, module in held.items() if scale.requires_grad}
            if not self._scales:
                raise TrainingError(
                    f"`{where}.penalty` (={config.penalty}) must be 0 for a network without trained scales of "
                    "BatchNorm, which it is put on; pass train.penalty=0 finetune.penalty=0, or another model."
                )

    def finish(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        """Do it, once a step, when all batches of the step have added theirs."""
        if self._scales or self._clip_norm is not None:
            scaler.unscale_(optimizer)
        with torch.no_grad():
            for scale, module in self._scales.items():
                if scale.grad is not None:
                    scale.grad.add_(cast(Tensor, module.weight).sign(), alpha=self._penalty)
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)


def kept_gradients(config: Mapping[str, Any]) -> Literal["masked", "dense"]:
    """Return how gradients are kept: dense ones cost less, and the bits are equal where no entry moves another."""
    known = config.get("clip_norm") is None and config.get("_target_") is None
    alone = known and config["optimizer"]["_target_"] in ELEMENTWISE
    return "dense" if alone else "masked"


def _parameter(module: nn.Module) -> nn.Parameter:
    """Return the parameter behind a module's `weight`, which pruning holds under another name."""
    return module.get_parameter("weight_orig" if "weight_orig" in module._parameters else "weight")


class Averages:
    """Exponential moving averages of parameters: average <- decay average + (1 - decay) parameter.

    They begin with the parameters after the first step, so that the initialisation has no part in them, and what is 0
    after every step is 0 in them.

    Args:
        parameters: what is trained.
        decay: in (0, 1).
    """

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters, self._decay = parameters, decay
        self.values: list[Tensor] = []
        """In the order of the parameters; none before the first step."""

    @torch.no_grad()
    def update(self) -> None:
        """Take in the parameters as an optimizer has left them."""
        if self.values:
            torch._foreach_lerp_(self.values, list(self._parameters), 1 - self._decay)
        else:
            self.values = [parameter.detach().clone() for parameter in self._parameters]

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the network have the averages for a while."""
        held = [parameter.detach().clone() for parameter in self._parameters]
        self.apply()
        try:
            yield
        finally:
            self._assign(held)

    def apply(self) -> None:
        """Let the network have the averages from now on."""
        self._assign(self.values)

    @torch.no_grad()
    def _assign(self, values: Sequence[Tensor]) -> None:
        if values:
            torch._foreach_copy_(list(self._parameters), list(values))
