"""Methods that prune whole channels: at random, or by norm."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.amount import Amount, resolve_amount, validate_amount
from pruning.base import BasePruningMethod, BuiltinMethod
from pruning.channels import Norm, alive_channels, channel_norms, check_dim, check_structured
from pruning.engines import EngineName
from pruning.selection import prune_random_, prune_smallest_


class RandomStructured(BuiltinMethod):
    """Prune channels at random: every subset of exactly `count` channels that are not yet pruned is equally likely.

        count = round(amount * alive channels)        or `amount` itself, if it is an int

    Args:
        amount: fraction of the channels along `dim` that are not all pruned (float), or their number (int).
        dim: the dimension whose slices are the channels.

    Raises:
        TypeError, ValueError: as `pruning.amount.validate_amount`; ValueError on use, for a tensor of fewer than 2
            dimensions and an int above what is left.
        IndexError: on use, where the tensor has no dimension `dim`.
    """

    PRUNING_TYPE: ClassVar[str] = "structured"

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.dim = dim

    def prune_(self, mask: Tensor, scores: Tensor) -> None:  # noqa: ARG002
        """Set to 0 randomly chosen channels of `mask` that are not all 0; `scores` are ignored."""
        check_structured(mask)
        dim = check_dim(mask, self.dim)
        channels = alive_channels(mask, dim)
        kept = prune_random_(channels.clone(), partial(resolve_amount, self.amount), generator=self.generator)
        drop_channels(mask, channels & ~kept, dim)


class LnStructured(BuiltinMethod):
    """Prune the channels of smallest norm.

        norm_c = (sum_i |w_ci|^n)^(1/n);    count = round(amount * alive channels)

    Ties go by lowest index. With n = 1 on the filters of a convolution this is Li et al., arXiv 1608.08710.

    Args:
        amount: fraction of the channels along `dim` that are not all pruned (float), or their number (int).
        n: the order of the norm: a number, inf, -inf, 'fro', or 'nuc' (3-D tensors only).
        dim: the dimension whose slices are the channels.

    Raises:
        TypeError, ValueError: as `pruning.amount.validate_amount`; ValueError on use, for a tensor of fewer than 2
            dimensions, an int above what is left, a norm that is NaN, and an `n` that is not defined.
        IndexError: on use, where the tensor has no dimension `dim`.
    """

    PRUNING_TYPE: ClassVar[str] = "structured"
    READS_PRUNED: ClassVar[bool] = True

    def __init__(self, amount: Amount, n: Norm, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.n = n
        self.dim = dim

    def prune_(self, mask: Tensor, scores: Tensor) -> None:
        """Set to 0 the channels of `mask` that are not all 0 and whose `scores` have the smallest norms."""
        check_structured(mask)
        dim = check_dim(mask, self.dim)
        channels = alive_channels(mask, dim)
        norms = channel_norms(scores, self.n, dim)
        kept = prune_smallest_(channels.clone(), norms, partial(resolve_amount, self.amount))
        drop_channels(mask, channels & ~kept, dim)

    @classmethod
    def apply(  # type: ignore[override]  # torch has no default for `dim` here, and takes the scores by position
        cls,
        module: nn.Module,
        name: str,
        amount: Amount,
        n: Norm,
        dim: int,
        importance_scores: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
        engine: EngineName | None = None,
    ) -> BasePruningMethod:
        """As `BasePruningMethod.apply`, by the norms of `importance_scores` (by default the parameter's)."""
        return super().apply(
            module, name, amount, n, dim, importance_scores=importance_scores, generator=generator, engine=engine
        )


def drop_channels(mask: Tensor, channels: Tensor, dim: int) -> None:
    """Set to 0, in place, the slices of `mask` along `dim` where the bools `channels` are True."""
    mask.index_fill_(dim, channels.nonzero().squeeze(1), 0)


torch_prune.RandomStructured.register(RandomStructured)
torch_prune.LnStructured.register(LnStructured)
