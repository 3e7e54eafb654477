"""One training on several ranks: shares of each batch, gradients of the whole batch, decisions that all ranks share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from orchestrator.core.seeding import derive, reseed
from orchestrator.training.loop.steps import TrainingError
from orchestrator.training.scoring.examples import count
from orchestrator.training.team.ranks import Ranks
from orchestrator.workloads.splits import Part
from orchestrator.workloads.tasks.task import Task


class _Losses(nn.Module):
    """A network whose forward pass is the loss of a batch, so that DistributedDataParallel wraps any task."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, batch: Any) -> Tensor:
        """Return the loss."""
        return self.loss_of(batch)


class Together:
    """A training as one of its ranks sees it.

    Every rank takes the same steps and makes the same calls, whatever its share of a batch. With the loss l_r, the mean
    over the s_r units of rank r's share, and S = sum_r s_r, a step follows the gradient of

        sum_r s_r l_r / S

    as one process does. All ranks hold the same weights after each step.

    Args:
        ranks: the ranks
        model: the network, whose weights and buffers become those of rank 0
        loss_of: batch -> loss, of this network
        task: counts the units of a batch
        seed: seed of the training; the draws of each step follow from it, the step and the rank
        norms: BatchNorms that are synchronised
    """

    def __init__(
        self,
        ranks: Ranks,
        model: nn.Module,
        loss_of: Callable[[Any], Tensor],
        task: Task,
        seed: int,
        norms: Sequence[Any],
    ) -> None:
        self.ranks, self._task, self._seed, self._norms = ranks, task, seed, norms
        self._model: Any = ranks.wrapped(_Losses(model, loss_of))
        self._tensors = [*model.parameters()]
        self._sizes: list[int] = []
        self._total = 0.0
        self.examples = 0
        """Number of examples of the step on all ranks."""

    def agree(self, parts: Sequence[Part], loss: float, *, ending: bool) -> tuple[bool, float]:
        """Begin a step; return whether the training ends before it, and the loss of the step before, over all ranks.

        Args:
            parts: this rank's shares of the batches of the step
            loss: this rank's part of the loss of the step before
            ending: whether this rank is asked to end
        """
        self._sizes = [self._task.size(part.batch) if part.counts else 0 for part in parts]
        examples = sum(count(part.batch) for part in parts if part.counts)
        ended, self._total, whole, everyone = self.ranks.sums([float(ending), sum(self._sizes), loss, examples])
        self.examples = round(everyone)
        return ended > 0, whole / self.ranks.size

    def whole(self, loss: float) -> float:
        """Return the loss of the last step over all ranks."""
        return self.ranks.sums([loss])[0] / self.ranks.size

    def reseed(self, step: int) -> None:
        """Seed this rank's generators for a step."""
        reseed(derive(self._seed, f"{step}/{self.ranks.rank}"), self.ranks.device)

    def loss(self, parts: Sequence[Part], place: int) -> Tensor:
        """Return the weighted loss of one of the batches of a step; gradients are exchanged after the last one."""
        for norm in self._norms:
            norm.counts = parts[place].counts
        weight = self._sizes[place] * self.ranks.size / max(self._total, 1.0)
        with nullcontext() if place == len(parts) - 1 else self._model.no_sync():  # the forward pass decides
            loss: Tensor = self._model(parts[place].batch)
        return loss * weight

    def require_equal(self, where: str) -> None:
        """Raise `TrainingError` unless all ranks hold the same weights."""
        if self.ranks.differ(self._tensors):
            raise TrainingError(
                f"`{where}` left other weights on other processes of the trial, so that its result is worthless: an "
                "optimizer, or masks that change, must follow from weights and gradients alone; pass parallel=none."
            )


def require_reached(where: str, parameters: Sequence[Tensor]) -> None:
    """Raise `TrainingError` if a step gave some parameters no gradient on this rank.

    Args:
        where: the training's place in the configuration.
        parameters: the parameters that are trained.
    """
    missing = sum(each.grad is None for each in parameters)
    if missing:
        raise TrainingError(
            f"`{where}` took a step in which the loss did not depend on {missing} of the network's parameters, as "
            "where layers are skipped at random; the processes of a trial exchange the gradients of all: pass "
            "parallel=none, or multiply skipped layers by 0."
        )
