"""One training on several ranks: shares of each batch, gradients, statistics and decisions of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from orchestrator.core.seeding import derive, reseed
from orchestrator.training.loop.training_job import TrainingError
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


class _Normalised(torch.autograd.Function):
    """Normalise by the statistics of the examples of all ranks.

        mean = sum_r n_r mean_r / N,  var = sum_r (n_r var_r + n_r (mean_r - mean)^2) / N,  N = sum_r n_r
        y = (x - mean) / sqrt(var + eps) weight + bias

    The gradient of x has the terms of all ranks' losses; those of weight and bias are of this rank's examples.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, counts: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        wide = inputs.float() if inputs.dtype in (torch.half, torch.bfloat16) else inputs
        places = [0, *range(2, inputs.ndim)]
        number = wide.new_full((1,), inputs.numel() / inputs.shape[1] if counts else 0)
        var, mean = torch.var_mean(wide, places, correction=0)
        own = torch.cat([mean, var, number]).contiguous()
        gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, own)
        means, variances, numbers = torch.split(torch.stack(gathered), [len(mean), len(var), 1], dim=1)
        total = numbers.sum()
        whole = (numbers * means).sum(0) / total
        spread = (numbers * (variances + (means - whole) ** 2)).sum(0) / total
        scale = torch.rsqrt(spread + eps)
        shape = [1, -1] + [1] * (inputs.ndim - 2)
        unit = (wide - whole.view(shape)) * scale.view(shape)
        found = unit if weight is None else unit * weight.view(shape)
        found = found if bias is None else found + bias.view(shape)
        ctx.save_for_backward(unit, scale, weight, total)
        ctx.counts, ctx.places, ctx.shape, ctx.dtype = counts, places, shape, inputs.dtype
        ctx.mark_non_differentiable(whole, spread, total)
        return found.to(inputs.dtype), whole, spread, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, given: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        unit, scale, weight, total = ctx.saved_tensors
        given = given.to(unit.dtype)
        of_bias, of_weight = given.sum(ctx.places), (given * unit).sum(ctx.places)
        sums = torch.cat([of_bias, of_weight])
        dist.all_reduce(sums)
        bias_sum, weight_sum = (each.view(ctx.shape) / total for each in sums.chunk(2))
        factor = scale if weight is None else scale * weight
        found = factor.view(ctx.shape) * (given - bias_sum - unit * weight_sum)
        found = found if ctx.counts else torch.zeros_like(found)
        missing = weight is None
        return found.to(ctx.dtype), None if missing else of_weight, None if missing else of_bias, None, None


class Synchronised:
    """Forward pass of a BatchNorm whose class is replaced during a training of several ranks."""

    counts: bool = True
    """Whether the batch of this rank holds examples of its share."""

    def forward(self: Any, inputs: Tensor) -> Tensor:
        """Normalise by the statistics of all ranks in training, by the running ones otherwise."""
        if not self.training:
            found: Tensor = _BatchNorm.forward(self, inputs)
            return found
        self._check_input_dim(inputs)
        normalised: Any = _Normalised.apply
        out, mean, var, total = normalised(inputs, self.weight, self.bias, self.eps, self.counts)
        if self.track_running_stats:
            with torch.no_grad():
                self.num_batches_tracked.add_(1)
                rate = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), rate)
                unbiased = var * (total / (total - 1).clamp(min=1))
                self.running_var.lerp_(unbiased.to(self.running_var.dtype), rate)
        return out  # type: ignore[no-any-return]


_CLASSES: dict[type, type] = {
    base: type(f"Synchronised{base.__name__}", (Synchronised, base), {})
    for base in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
}


@contextmanager
def synchronised(model: nn.Module, ranks: Ranks | None) -> Iterator[list[Any]]:
    """Let every BatchNorm use the statistics of all ranks inside the context, if the trial asks for it; yield them.

    Raises:
        TrainingError: a BatchNorm is of a class of its own.
    """
    found: list[Any] = []
    if ranks is not None and ranks.sync_batch_norm:
        found = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        if odd := next((module for module in found if type(module) not in _CLASSES), None):
            raise TrainingError(
                f"`parallel.sync_batch_norm` (=true) knows torch's BatchNorm1d, 2d and 3d, and the network has "
                f"{type(odd).__name__}; pass parallel.sync_batch_norm=false."
            )
    classes = [type(module) for module in found]
    for module, base in zip(found, classes, strict=True):
        module.__class__ = _CLASSES[base]
    try:
        yield found
    finally:
        for module, base in zip(found, classes, strict=True):
            module.__class__ = base
            vars(module).pop("counts", None)
