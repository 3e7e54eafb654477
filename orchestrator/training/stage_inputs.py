"""Inputs of a stage: its order, its network with data and masks, its task and checkpoints, other networks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import nn

from orchestrator.core.seeding import derive
from orchestrator.core.specs import StageSpec
from orchestrator.core.stage_kinds import KINDS
from orchestrator.core.work_order import StageOrder
from orchestrator.training.loop.training_job import TrainingJob
from orchestrator.training.loop.training_loop import Cancelled
from orchestrator.training.scoring.examples import source_of
from orchestrator.training.scoring.ranking import Read, Round
from orchestrator.training.stage_networks import Network, stored
from orchestrator.training.state.checkpointing import Checkpointing
from orchestrator.training.state.train_state import TrainState
from orchestrator.workloads.data_loading import Data
from orchestrator.workloads.tasks import task_building
from orchestrator.workloads.tasks.distilled import with_teacher
from orchestrator.workloads.tasks.task import Task


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

    @cached_property
    def asked(self) -> Round:
        """The round, for a stage that prunes."""
        return Round.of(self.spec.fields)

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
            ranks=order.worker.ranks,
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
