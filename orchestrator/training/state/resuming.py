"""Continue a training: the parts of its state, and the step of the dense training to which a round rewinds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from orchestrator.core.errors import StageMissing
from orchestrator.core.file_names import STATE, STATE_VALUES
from orchestrator.core.plain_data import read_as
from orchestrator.core.records import CurvePoint
from orchestrator.core.specs import RATES, REWIND, StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageOrder, StageStore
from orchestrator.training.loop.training_job import Averages, Steps, TrainingError, TrainingJob
from orchestrator.training.pruning_rounds import hold_rewound, masked
from orchestrator.training.stage_networks import MISFITS, Network, fitting, redrawn, stored
from orchestrator.training.state.train_state import (
    NotPlain,
    TrainState,
    as_bytes,
    as_tensor,
    generators,
    module_state,
    optimizer_state,
    restore_generators,
    restore_module,
    restore_optimizer,
    restore_task,
    task_state,
)
from orchestrator.workloads.tasks.distilled import Distilled
from orchestrator.workloads.tasks.task import Task
from orchestrator.workloads.weight_files import plain_state
from pruning import MaskSet

_NUMBERS = ("step", "rate", "skipped", "selected_step", "best", "stale")


class Unfit(Exception):
    """State that belongs to another training; the text says why."""


class Resumable:
    """Training between two steps."""

    job: TrainingJob
    parameters: list[nn.Parameter]
    """Parameters that are trained."""
    steps: Steps
    length: int
    """Number of steps of the whole training."""
    since: int = 0
    """Step of the whole training from which this training counts its own."""
    optimizer: Optimizer
    scheduler: LRScheduler | None
    scaler: GradScaler
    step: int = 0
    rate: float = 0.0
    """Learning rate of the last step."""
    skipped: bool = False
    """Whether fp16 gradients overflowed in the last step; it then moved no weight and lowered the loss scale."""
    curve: list[CurvePoint]
    losses: list[Tensor]
    """Training losses of the steps since the last point of the curve."""
    best: float = -math.inf
    selected_step: int = 0
    best_state: list[Tensor] | None = None
    """Parameters and buffers at the best step."""
    best_extra: Mapping[str, Any] = MappingProxyType({})
    """Results of `get_extra_state` at the best step."""
    averages: Averages | None
    best_masks: MaskSet | None = None
    """Changing masks at the best step."""
    stale: int = 0
    """Number of evaluations since the last new best."""

    def at(self, place: int | str) -> int:
        """Return the step of a place in this training; raise `TrainingError` if it lies after the end."""
        step = self.steps.at(place)
        if step > self.length:
            raise TrainingError(
                f"`restart.step` or `restart.rates` (={place}) must be at most {self.length}, the steps of the dense "
                "training; pass a smaller one."
            )
        return step

    def require_since(self) -> None:
        """Raise `TrainingError` if the restored training ended before the step from which this one counts."""
        if self.step < self.since:
            raise TrainingError(
                f"`restart.step` or `restart.rates` (={self.since}) must be at most {self.step}, where the dense "
                "training stopped early; pass a smaller one, or train.patience=null."
            )

    def _state(self) -> Iterator[Tensor]:
        yield from self.job.model.parameters()
        yield from self.job.model.buffers()

    def state(self) -> TrainState:
        """Return the complete state between two steps, from which the rest of the training follows."""
        parts = {name: getattr(self, name) for name in _NUMBERS}
        parts |= {
            "model": module_state(self.job.model),
            "task": task_state(_without_teacher(self.job.task), self.job.model),
            "optimizer": optimizer_state(self.optimizer),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
            "generators": generators(self.job.device),
            "curve": [asdict(point) for point in self.curve],
            "losses": torch.stack(self.losses) if self.losses else None,
            "best_state": self.best_state,
            "best_extra": dict(self.best_extra),
            "averages": None if self.averages is None else self.averages.values,
            "cost": None if self.job.cost is None else self.job.cost.state(),
            "dynamics": None if self.job.sparse is None else self.job.sparse.state(),
            "best_masks": None if self.best_masks is None else as_tensor(self.best_masks.to_bytes()),
        }
        return TrainState.of(parts)

    def go_on(self, state: TrainState) -> None:
        """Continue the training from `state`; raise `Unfit` if it belongs to another training."""
        try:
            self._go_on(state)
        except torch.OutOfMemoryError:
            raise
        except (*MISFITS, RuntimeError) as error:
            raise Unfit(str(error)) from error

    def _go_on(self, state: TrainState) -> None:
        restore_module(self.job.model, state.part("model"))
        restore_task(_without_teacher(self.job.task), state.part("task"), self.job.device)
        restore_optimizer(self.optimizer, state.part("optimizer"))
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state.part("scheduler"))
        self.scaler.load_state_dict(state.part("scaler"))
        self.curve = [read_as(CurvePoint, point) for point in state.part("curve")]
        losses, best = state.part("losses"), state.part("best_state")
        self.losses = [] if losses is None else [each.reshape(()) for each in losses.to(self.job.device).unbind()]
        self.best_state = None if best is None else _matching_tensors(self._state(), best, "best_state")
        self.best_extra = dict(state.part("best_extra"))
        if self.averages is not None:
            values = state.part("averages")
            self.averages.values = _matching_tensors(self.parameters, values, "averages") if values else []
        if self.job.cost is not None:
            self.job.cost.go_on(state.get("cost"))
        masks = state.get("best_masks")
        self.best_masks = None if masks is None else MaskSet.from_bytes(as_bytes(masks), self.job.model)
        for name in _NUMBERS:
            value, now = state.part(name), getattr(self, name)
            if type(value) is not type(now):
                raise ValueError(f"its {name} is {value!r}, not a value of type {type(now).__name__}")
            setattr(self, name, value)
        if not 0 <= self.selected_step <= self.step <= self.length:
            raise ValueError(f"it is at step {self.step} of {self.length} and selected step {self.selected_step}")
        restore_generators(state.part("generators"), self.job.device)


def _without_teacher(task: Task) -> Task:
    return task.task if isinstance(task, Distilled) else task


def _matching_tensors(tensors: Iterable[Tensor], saved: Sequence[Tensor], what: str) -> list[Tensor]:
    """Return the saved tensors on the devices of `tensors`; raise `ValueError` if shapes or dtypes differ."""
    found = list(tensors)
    if [(each.shape, each.dtype) for each in found] != [(each.shape, each.dtype) for each in saved]:
        raise ValueError(f"it belongs to another network: its {what} has other shapes or dtypes")
    return [each.to(now.device) for now, each in zip(found, saved, strict=True)]


_UNMEASURED: Mapping[str, Any] = {
    "losses": None,
    "best": -math.inf,
    "best_state": None,
    "best_extra": {},
    "stale": 0,
}
"""State values of a training before its first evaluation."""
_OWN: Mapping[str, Any] = {"cost": {}, "dynamics": None, "best_masks": None}
"""State values of a round's own training before its first step."""


def state_of(store: StageStore, key: str) -> TrainState:
    """Return the final state of a start stage, which trains up to a step."""
    return TrainState(store.stages.tensors(key, STATE), store.stages.values(key, STATE_VALUES))


def furthest(store: StageStore, keys: Sequence[str], started_from: str) -> tuple[TrainState | None, float]:
    """Return the state of the stage with the most steps, and the seconds that the stage that continues counts with it.

    The state is None if none can be read. It only saves work, so one of other weights is left out, and a damaged one is
    skipped for the next. A round counts the seconds of its parts; a dense training doesn't count those of its starts.

    Args:
        store: the store
        keys: stages that end at a place of the same training
        started_from: digest of the weights that the training starts from
    """
    found = {key: record for key, record in store.finished(keys).items() if record.started_from == started_from}
    for key in sorted(found, key=lambda key: found[key].steps, reverse=True):
        with suppress(StageMissing):
            return state_of(store, key), found[key].seconds if KINDS[found[key].kind].part else 0.0
    return None, 0.0


def restart(network: Network, masks: MaskSet, stage: StageOrder) -> None:
    """Set the weights from which a round trains: its own, or those of the row of `restart.weights`."""
    row = stage.spec.typed.restart.weights_row
    if not row.keeps:
        row.load()(network, masks, stage)
        masked(network.model, masks)


def rewind(network: Network, masks: MaskSet, stage: StageOrder) -> None:
    """Set the weights of a step of the dense training.

    Raises:
        LawBroken: the rewound weights differ from those of the step.
    """
    key = stage.spec.inputs[REWIND]
    saved, _ = stored(key, stage)
    state = _input_state(REWIND, stage.spec, stage.store)
    with fitting(key, STATE):
        restore_module(network.model, module_state(saved.model) if state is None else state.part("model"))
    masked(network.model, masks)
    hold_rewound(plain_state(network.model), plain_state(saved.model), masks)


def redraw(network: Network, _masks: MaskSet, stage: StageOrder) -> None:
    """Set new random weights."""
    restore_module(network.model, module_state(redrawn(network, stage)))


def onward(model: nn.Module, masks: Sequence[Tensor | None], spec: StageSpec, store: StageStore) -> TrainState | None:
    """Return the state of the dense training that a round continues; None for a round that fine-tunes.

    Schedule, scaler, generators and place in the data order are those of the step. Measurements and selected weights
    are dropped, because they belong to another network; they stay if nothing is masked, now or within the training, and
    the weights are that step's.

    Args:
        model: the network to train, with its first weights
        masks: masks of the trained parameters, in their order
        spec: the round
        store: the store with the stages of the dense training
    """
    state = _input_state(RATES, spec, store)
    if state is None:
        return None
    with fitting(spec.inputs[RATES], STATE, (*MISFITS, NotPlain)):
        return _masked_state(masks, state, model, spec)


def _masked_state(masks: Sequence[Tensor | None], state: TrainState, model: nn.Module, spec: StageSpec) -> TrainState:
    """Return the state of the dense training as `onward` describes it."""
    parts = {name: state.part(name) for name in state.values} | {"model": module_state(model), "curve": [], **_OWN}
    same = spec.inputs.get(REWIND) == spec.inputs[RATES]
    if not same or spec.typed.changes_masks or any(mask is not None and not bool(mask.all()) for mask in masks):
        parts |= {**_UNMEASURED, "selected_step": parts["step"]}
    averages = parts["averages"] if same else None
    parts["averages"] = averages and [_masked(value, mask) for value, mask in zip(averages, masks, strict=True)]
    found = parts["optimizer"]["state"]
    kept = found["state"].items() if spec.typed.restart.optimizer == "restored" else ()
    found["state"] = {
        index: {name: _masked(value, masks[index]) for name, value in each.items()} for index, each in kept
    }
    if len(groups := found["param_groups"]) == 1:  # a small network may have fewer parameters
        found["param_groups"] = [{**groups[0], "params": [*range(len(masks))]}]
    return TrainState.of(parts)


def _input_state(role: str, spec: StageSpec, store: StageStore) -> TrainState | None:
    """Return the dense training's state in the input `role`; None without that input or for a training function."""
    key = spec.inputs.get(role)
    return None if key is None or spec.training_config.get("_target_") else state_of(store, key)


def _masked(value: Any, mask: Tensor | None) -> Any:
    """Return a parameter's value with zeros where the parameter is masked; a value of another shape stays unchanged."""
    if mask is None or not isinstance(value, Tensor) or value.shape != mask.shape:
        return value
    return torch.where(mask.to(value.device), value, torch.zeros_like(value))
