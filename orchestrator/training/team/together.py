"""One training on several ranks: shares of each batch, gradients, statistics and decisions of the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from orchestrator.config.training import Train
from orchestrator.training.loop.evaluation import autocast
from orchestrator.training.loop.training_job import TrainingError, TrainingJob
from orchestrator.training.scoring.examples import count
from orchestrator.training.team.ranks import Processes
from orchestrator.workloads.splits import Part


class _Losses(nn.Module):
    """A network whose forward pass is the loss of a batch, so that DistributedDataParallel wraps any task."""

    def __init__(self, model: nn.Module, loss_of: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_of = model, loss_of

    def forward(self, batch: Any) -> Tensor:
        """Return the loss."""
        return self.loss_of(batch)


class Alone:
    """Backward passes of a training in one process.

    Args:
        job: the training.
        loss_of: batch -> loss, of the job's network.
    """

    def __init__(self, job: TrainingJob, loss_of: Callable[[Any], Tensor]) -> None:
        self.job, self.config, self.loss_of = job, Train(**job.config), loss_of

    def agree(self, batches: Sequence[Any], losses: list[Tensor], *, ending: bool) -> bool:
        """Begin a step; return whether the training ends before it. The last loss becomes that over all ranks.

        Args:
            batches: the batches of the step, or this rank's shares of them.
            losses: losses of the steps so far, on this rank.
            ending: whether this process is asked to end.
        """
        del batches, losses
        return ending

    def settle(self, losses: list[Tensor]) -> None:
        """Make the loss of the last step the one over all ranks."""

    def examples(self, batches: Sequence[Any]) -> int:
        """Return the number of examples of the step on all ranks."""
        return sum(map(count, batches))

    def backward(self, batches: Sequence[Any], scaler: GradScaler, step: int) -> Tensor:
        """Add the gradients of the step after `step`, the mean over all examples; return this rank's loss."""
        del step
        sizes = [self.job.task.size(batch) for batch in batches] if len(batches) > 1 else [1]
        if not any(sizes):  # no batch has a target that counts: each loss is 0
            sizes = [1] * len(batches)
        losses = []
        for batch, size in zip(batches, sizes, strict=True):
            if not size:
                continue
            with autocast(self.job.device, self.config.precision):
                loss = self._loss(batch)
            if len(batches) > 1:
                loss = loss * (size / sum(sizes))
            torch.autograd.backward(scaler.scale(loss))
            losses.append(loss.detach())
        return sum(losses[1:], losses[0])

    def require_equal(self) -> None:
        """Raise `TrainingError` unless all ranks hold the same weights."""

    def _loss(self, batch: Any) -> Tensor:
        try:
            return self.loss_of(batch)
        except RuntimeError as error:
            if not self.config.compile or not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise
            said = str(error).strip().splitlines()[0]
            raise TrainingError(
                f"torch.compile failed with {type(error).__name__}: {said}; pass train.compile=false "
                "finetune.compile=false."
            ) from error


class Together(Alone):
    """A training as one of its ranks sees it.

    Every rank takes the same steps and makes the same calls, whatever its share of a batch. With the loss l_r, the mean
    over the s_r units of rank r's share, and S = sum_r s_r, a step follows the gradient of

        sum_r s_r l_r / S

    as one process does. All ranks hold the same weights after each step.

    Args:
        job: the training; its network gets the weights and buffers of rank 0.
        loss_of: batch -> loss, of the job's network.
        norms: BatchNorms that are synchronised.
    """

    def __init__(self, job: TrainingJob, loss_of: Callable[[Any], Tensor], norms: Sequence[Any]) -> None:
        super().__init__(job, loss_of)
        self._ranks, self._norms = job.ranks, norms
        self._model: Any = job.ranks.wrapped(_Losses(job.model, loss_of))
        self._sizes: list[int] = []
        self._total, self._examples = 0.0, 0
        self._is_settled = True
        """Whether the loss of the last step is that over all ranks."""

    def agree(self, batches: Sequence[Any], losses: list[Tensor], *, ending: bool) -> bool:
        self._sizes = [self.job.task.size(part.batch) if part.counts else 0 for part in batches]
        examples = sum(count(part.batch) for part in batches if part.counts)
        own = 0.0 if self._is_settled else float(losses[-1])
        ended, self._total, whole, everyone = self._ranks.sums([float(ending), sum(self._sizes), own, examples])
        self._examples = round(everyone)
        self._settled(losses, whole)
        return ended > 0

    def settle(self, losses: list[Tensor]) -> None:
        if not self._is_settled:
            self._settled(losses, self._ranks.sums([float(losses[-1])])[0])

    def _settled(self, losses: list[Tensor], whole: float) -> None:
        if not self._is_settled:
            losses[-1] = torch.full_like(losses[-1], whole / self._ranks.size, dtype=torch.float64)
            self._is_settled = True

    def examples(self, batches: Sequence[Any]) -> int:
        del batches
        return self._examples

    def backward(self, batches: Sequence[Any], scaler: GradScaler, step: int) -> Tensor:
        """Add the gradients of the step, which all ranks exchange; return this rank's part of its loss."""
        self._ranks.reseed(self.job.seed, step)
        losses, self._is_settled = [], False
        for place in range(len(batches)):
            with autocast(self.job.device, self.config.precision):
                loss = self._part_loss(batches, place)
            torch.autograd.backward(scaler.scale(loss))
            losses.append(loss.detach())
        require_reached(self.job.where, [each for each in self.job.model.parameters() if each.requires_grad])
        return sum(losses[1:], losses[0])

    def _part_loss(self, parts: Sequence[Part], place: int) -> Tensor:
        """Return the weighted loss of one of the batches of a step; gradients are exchanged after the last one."""
        for norm in self._norms:
            norm.counts = parts[place].counts
        weight = self._sizes[place] * self._ranks.size / max(self._total, 1.0)
        with nullcontext() if place == len(parts) - 1 else self._model.no_sync():  # the forward pass decides
            loss: Tensor = self._model(parts[place].batch)
        return loss * weight

    def require_equal(self) -> None:
        if self._ranks.differ([*self.job.model.parameters()]):
            raise TrainingError(
                f"`{self.job.where}` left other weights on other processes of the trial, so that its result is "
                "worthless: an optimizer, or masks that change, must follow from weights and gradients alone; pass "
                "parallel=none."
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
def synchronised(model: nn.Module, ranks: Processes) -> Iterator[list[Any]]:
    """Let every BatchNorm use the statistics of all ranks inside the context, if the trial asks for it; yield them.

    Raises:
        TrainingError: a BatchNorm is of a class of its own.
    """
    found: list[Any] = []
    if ranks.sync_batch_norm:
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
