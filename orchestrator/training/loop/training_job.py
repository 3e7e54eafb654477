"""A training as a value: its network, data, task and settings, what accompanies its steps, and its result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from orchestrator.core.records import CurvePoint
from orchestrator.core.work_order import never
from orchestrator.training.loop.sparse_training import SparseTraining, TrainingCost
from orchestrator.training.state.train_state import TrainState
from orchestrator.training.team.ranks import Ranks
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.tasks.task import Task
from pruning import MaskSet

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
    ranks: Ranks | None = None
    """Ranks of a trial of several processes, each of which runs the job; None for one process."""


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
