"""How a stage trains, measures and reads other stages: the part of it that a rehearsal replaces."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from orchestrator.core.records import BLOCKS, CurvePoint
from orchestrator.training.loop.evaluation import evaluate, generated
from orchestrator.training.loop.training_job import FitResult
from orchestrator.training.scoring.layer_by_layer import Blocks
from orchestrator.training.stage_networks import stored
from orchestrator.training.state.rewinding import onward, restart
from orchestrator.training.state.train_state import TrainState
from orchestrator.workloads.splits import Split
from orchestrator.workloads.tasks.task import Measured, TestInputs
from pruning import MaskSet

if TYPE_CHECKING:
    from orchestrator.training.training_stages import Stage


class Ways:
    """How a stage trains, measures and reads other stages; the preflight's rehearsal overrides these methods."""

    def train(self, stage: Stage, fit: Callable[[], FitResult]) -> FitResult:
        """Run a training of the stage."""
        del stage
        return fit()

    def measure(self, stage: Stage, split: Split, inputs: TestInputs | None = None) -> Measured:
        """Return the metrics of the network on a split; with `inputs`, on a test split."""
        sizes = {"batch_size": stage.config["eval_batch_size"], "precision": stage.config["precision"]}
        return evaluate(stage.model, split, stage.task, device=stage.device, **sizes, inputs=inputs)

    def generations(self, stage: Stage, inputs: TestInputs) -> list[dict[str, str]]:
        """Return the network's continuations of the task's prompts."""
        return generated(stage.model, stage.task, inputs, stage.config["precision"])

    def after_block(self, stage: Stage, blocks: Blocks) -> None:
        """Report the block, save a checkpoint if one is due, and end the pruning if the stage must end."""
        point = CurvePoint(blocks.number, 0.0, time.time(), {BLOCKS: blocks.total})
        stage.order.report(stage.spec.key, point, stage.task.metrics[0])
        stage.keep_or_end(partial(blocks.state, stage.model))

    def restart(self, stage: Stage, masks: MaskSet) -> None:
        """Set the weights from which the round trains."""
        restart(stage.network, masks, stage.spec, stage.order)

    def onward(self, stage: Stage, masks: Sequence[Tensor | None]) -> TrainState | None:
        """Return the state of the training that the stage continues; None if it continues none."""
        return onward(stage.model, masks, stage.spec, stage.order.store)

    def other_network(self, stage: Stage, role: str) -> nn.Module | None:
        """Return the network of the input with this role, in evaluation mode and frozen; None without the input."""
        key = stage.spec.inputs.get(role)
        return None if key is None else stored(key, stage.spec, stage.order)[0].model.eval().requires_grad_(False)
