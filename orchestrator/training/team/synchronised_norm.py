"""BatchNorm over the examples of all ranks; torch's SyncBatchNorm refuses tensors on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from orchestrator.training.loop.steps import TrainingError
from orchestrator.training.team.ranks import Ranks


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
