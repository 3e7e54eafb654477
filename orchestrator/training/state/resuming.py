"""What of a training its state is made of, and how it is taken up from there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.core.plain_data import read_as
from orchestrator.core.records import CurvePoint
from orchestrator.training.stage_networks import MISFITS
from orchestrator.training.state.task_state import restore_task, task_state
from orchestrator.training.state.train_state import (
    TrainState,
    generators,
    module_state,
    optimizer_state,
    restore_generators,
    restore_module,
    restore_optimizer,
)
from orchestrator.training.steps import Averages, Steps, TrainingError
from orchestrator.workloads.tasks.distilled import Distilled
from orchestrator.workloads.tasks.task import Task

Keep = Callable[[Callable[[], TrainState], bool], object]
"""Told before each batch how to get the state as it is then, and whether the training is about to be cancelled."""
_NUMBERS = ("step", "rate", "skipped", "selected_step", "best", "stale")


class Unfit(Exception):
    """A state that is not one of this training; says why."""


class Resumable:
    """A training between two steps."""

    model: nn.Module
    parameters: list[nn.Parameter]
    """Those that are trained."""
    steps: Steps
    length: int
    """Steps of the whole training."""
    since: int = 0
    """That from which this one counts."""
    task: Task
    """What it and its losses remember belongs to the state of the training; a teacher does not."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: GradScaler
    device: torch.device
    step: int
    rate: float
    """The learning rate of the last step."""
    skipped: bool
    """The last step's fp16 gradients overflowed: it moved nothing, and the loss is scaled less from now on."""
    curve: list[CurvePoint]
    losses: list[Tensor]
    """Of the steps since the last point."""
    best: float
    selected_step: int
    best_state: list[Tensor] | None
    """Parameters and buffers, as they were then."""
    best_extra: dict[str, Any]
    """What `get_extra_state` said then."""
    averages: Averages | None
    stale: int
    """Evaluations since the last new best."""

    def at(self, place: int | str) -> int:
        """Return the step of a place in this training; raise `TrainingError` for one beyond its end."""
        step = self.steps.at(place)
        if step > self.length:
            raise TrainingError(
                f"a step to rewind to (={place}) must be at most {self.length}, the steps of the dense training; pass "
                "a smaller `restart.step` or `restart.rates`."
            )
        return step

    def require_since(self) -> None:
        """Raise `TrainingError` for a state of a training that ended before the step that is to be gone on from."""
        if self.step < self.since:
            raise TrainingError(
                f"a step to rewind to (={self.since}) must be at most {self.step}, where the dense training stopped "
                "early; pass a smaller `restart.step` or `restart.rates`, or train.patience=null."
            )

    def _state(self) -> Iterator[Tensor]:
        yield from self.model.parameters()
        yield from self.model.buffers()

    def state(self) -> TrainState:
        """Return all that the rest of the training follows from, as it is between two steps."""
        parts = {name: getattr(self, name) for name in _NUMBERS}
        parts |= {
            "model": module_state(self.model),
            "task": task_state(_learned(self.task), self.model),
            "optimizer": optimizer_state(self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generators(self.device),
            "curve": [asdict(point) for point in self.curve],
            "losses": torch.stack(self.losses) if self.losses else None,
            "best_state": self.best_state,
            "best_extra": self.best_extra,
            "averages": None if self.averages is None else self.averages.values,
        }
        return TrainState.of(parts)

    def go_on(self, state: TrainState) -> None:
        """Take up the training where `state` was; raise `Unfit` where that is none of this training."""
        try:
            self._go_on(state)
        except torch.OutOfMemoryError:
            raise
        except (*MISFITS, RuntimeError) as error:
            raise Unfit(str(error)) from error

    def _go_on(self, state: TrainState) -> None:
        restore_module(self.model, state.part("model"))
        restore_task(_learned(self.task), state.part("task"), self.device)
        restore_optimizer(self.optimizer, state.part("optimizer"))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state.part("scheduler"))
        self.scaler.load_state_dict(state.part("scaler"))
        self.curve = [read_as(CurvePoint, point) for point in state.part("curve")]
        losses, best = state.part("losses"), state.part("best_state")
        self.losses = [] if losses is None else [each.reshape(()) for each in losses.to(self.device).unbind()]
        self.best_state = None if best is None else _like(self._state(), best, "best_state")
        self.best_extra = dict(state.part("best_extra"))
        if self.averages is not None:
            values = state.part("averages")
            self.averages.values = _like(self.parameters, values, "averages") if values else []
        for name in _NUMBERS:
            value, now = state.part(name), getattr(self, name)
            if type(value) is not type(now):
                raise ValueError(f"its {name} is {value!r}, no {type(now).__name__}")
            setattr(self, name, value)
        if not 0 <= self.selected_step <= self.step <= self.length:
            raise ValueError(f"it is at step {self.step} of {self.length}, and selects step {self.selected_step}")
        restore_generators(state.part("generators"), self.device)


def _learned(task: Task) -> Task:
    return task.task if isinstance(task, Distilled) else task


def _like(tensors: Iterable[Tensor], saved: Sequence[Tensor], what: str) -> list[Tensor]:
    """Return the saved tensors where those are that they stand for; raise `ValueError` for other shapes or dtypes."""
    found = list(tensors)
    if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in saved]:
        raise ValueError(f"it is of another network: its {what} has other shapes or dtypes")
    return [each.to(now.device) for now, each in zip(found, saved, strict=True)]
