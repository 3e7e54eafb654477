"""Built-in methods: entries at random, by magnitude or by a given mask, and channels at random or by norm."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.choices.axes import Amount, resolve_amount, validate_amount
from pruning.holding.parameter import check_tensor
from pruning.methods.base import BasePruningMethod, BuiltinMethod
from pruning.selection.channel_masks import (
    Norm,
    alive_channels,
    channel_norms,
    check_dim,
    check_norm,
    check_structured,
    drop_channels,
    mask_of_channels,
)
from pruning.selection.random_subset import prune_random_, prune_random_across_
from pruning.selection.smallest import prune_smallest_, prune_smallest_across_


class Identity(BuiltinMethod, BasePruningMethod):
    """Prune nothing: the mask does not change (all ones in the first round)."""

    PRUNING_TYPE: ClassVar[str] = "unstructured"

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:
        """Do not change `masks`."""


class RandomUnstructured(BuiltinMethod, BasePruningMethod):
    """Prune entries at random: every subset of exactly `count` unpruned entries is equally likely.

        count = round(amount * unpruned)        or `amount` itself, if it is an int

    Args:
        amount: fraction of the currently unpruned entries in [0, 1] (float), or their number (int).

    Raises:
        TypeError, ValueError: as `pruning.validate_amount`; ValueError on use, if an int amount is larger than
            the number of unpruned entries.
    """

    PRUNING_TYPE: ClassVar[str] = "unstructured"

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:  # noqa: ARG002
        """Set to 0 a random subset of the nonzero entries of all `masks`; `scores` are ignored."""
        prune_random_across_(masks, partial(resolve_amount, self.amount), generator=self.generator)


class L1Unstructured(BuiltinMethod, BasePruningMethod):
    """Prune the entries of smallest magnitude.

        keep w_i where |w_i| ranks above the `count` smallest;    count = round(amount * unpruned)

    Among equal entries, the entry with the lowest index is pruned first. Magnitude pruning: Han et al.,
    arXiv 1506.02626.

    Args:
        amount: fraction of the currently unpruned entries in [0, 1] (float), or their number (int).

    Raises:
        TypeError, ValueError: as `pruning.validate_amount`; ValueError on use, if an int amount is larger than
            the number of unpruned entries, or scores of unpruned entries are NaN.
    """

    PRUNING_TYPE: ClassVar[str] = "unstructured"

    def __init__(self, amount: Amount) -> None:
        validate_amount(amount)
        self.amount = amount

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:
        """Set to 0 the nonzero entries of all `masks` with the smallest |scores|."""
        exact = [each if each.is_floating_point() or each.is_complex() else each.double() for each in scores]
        prune_smallest_across_(masks, exact, partial(resolve_amount, self.amount), magnitude=True)  # int8: |-128|

    @classmethod
    def apply(  # type: ignore[override]  # torch takes the scores by position too
        cls,
        module: nn.Module,
        name: str,
        amount: Amount,
        importance_scores: Tensor | None = None,
        *,
        generator: torch.Generator | None = None,
    ) -> BasePruningMethod:
        """Apply as `BasePruningMethod.apply`, by the magnitude of `importance_scores` (default: the parameter)."""
        return super().apply(module, name, amount, importance_scores=importance_scores, generator=generator)


class CustomFromMask(BuiltinMethod, BasePruningMethod):
    """Prune the entries where a given mask is 0.

    Args:
        mask: zeros and ones, of the parameter's shape, any dtype. The method releases it after `apply`, because the
            module's own mask contains it.

    Raises:
        TypeError: `mask` is no tensor.
        ValueError: on use, if `mask` has another shape, or values other than 0 and 1.
    """

    PRUNING_TYPE: ClassVar[str] = "global"

    def __init__(self, mask: Tensor) -> None:
        check_tensor(mask, "mask")
        self.mask: Tensor | None = mask

    def prune_(self, mask: Tensor, scores: Tensor) -> None:  # noqa: ARG002
        """Set `mask` to 0 where the given mask is 0."""
        if self.mask is None:
            raise ValueError("this CustomFromMask was applied and has released its mask; make a new one.")
        if self.mask.shape != mask.shape:
            raise ValueError(
                f"`mask` (of shape {tuple(self.mask.shape)}) must have the parameter's shape, {tuple(mask.shape)}."
            )
        given = self.mask.detach().to(device=mask.device)
        if given.dtype != torch.bool and not torch.logical_or(given == 0, given == 1).all():
            raise ValueError("`mask` must contain only zeros and ones; pass `mask != 0` to keep all nonzero entries.")
        mask.mul_(given if given.dtype == torch.bool else given.to(mask.dtype))

    def forget(self) -> None:
        """Release the mask, which is now part of the module's own mask."""
        self.mask = None


torch_prune.Identity.register(Identity)
torch_prune.RandomUnstructured.register(RandomUnstructured)
torch_prune.L1Unstructured.register(L1Unstructured)
torch_prune.CustomFromMask.register(CustomFromMask)


class _Structured(BuiltinMethod, BasePruningMethod):
    """Base class of methods that prune channels along `dim`."""

    PRUNING_TYPE: ClassVar[str] = "structured"
    dim: int

    @abstractmethod
    def prune_channels_(self, kept: Tensor, scores: Tensor, dim: int) -> None:
        """Set further entries of the bools `kept`, one per channel, to False."""

    def prune_(self, mask: Tensor, scores: Tensor) -> None:
        """Set further channels of `mask`, among those that are not all 0, to 0."""
        check_structured(mask)
        dim = check_dim(mask, self.dim)
        alive = alive_channels(mask, dim)
        kept = alive.clone()
        self.prune_channels_(kept, scores, dim)
        drop_channels(mask, alive & ~kept, dim)

    def first_mask(self, scores: Tensor, like: Tensor) -> Tensor:
        """Return the first mask of an unpruned tensor, written in one pass."""
        check_structured(like)
        dim = check_dim(like, self.dim)
        kept = torch.ones(like.shape[dim], dtype=torch.bool, device=like.device)
        self.prune_channels_(kept, scores, dim)
        return mask_of_channels(kept, dim, like)


class RandomStructured(_Structured):
    """Prune channels at random: every subset of exactly `count` unpruned channels is equally likely.

        count = round(amount * unpruned channels)        or `amount` itself, if it is an int

    Args:
        amount: fraction of the channels along `dim` that are not entirely pruned (float), or their number (int).
        dim: dimension whose slices are the channels.

    Raises:
        TypeError, ValueError: as `pruning.validate_amount`; ValueError on use, if the tensor has fewer than 2
            dimensions, or an int amount is larger than the number of unpruned channels.
        IndexError: on use, if the tensor has no dimension `dim`.
    """

    def __init__(self, amount: Amount, dim: int = -1) -> None:
        validate_amount(amount)
        self.amount = amount
        self.dim = dim

    def prune_channels_(self, kept: Tensor, scores: Tensor, dim: int) -> None:  # noqa: ARG002
        """Set to False randomly chosen channels; `scores` are ignored."""
        prune_random_(kept, partial(resolve_amount, self.amount), generator=self.generator)


class LnStructured(_Structured):
    """Prune the channels of smallest norm.

        norm_c = (sum_i |w_ci|^n)^(1/n);    count = round(amount * unpruned channels)

    Among equal norms, the channel with the lowest index is pruned first. With n = 1 on the filters of a convolution
    this is the method of Li et al., arXiv 1608.08710.

    Args:
        amount: fraction of the channels along `dim` that are not entirely pruned (float), or their number (int).
        n: order of the norm: a number, inf, -inf, 'fro', or 'nuc' (3-D tensors only).
        dim: dimension whose slices are the channels.

    Raises:
        TypeError, ValueError: as `pruning.validate_amount`; ValueError on use, if the tensor has fewer than 2
            dimensions, an int amount is larger than the number of unpruned channels, a norm is NaN, or `n` is not
            defined.
        IndexError: on use, if the tensor has no dimension `dim`.
    """

    READS_PRUNED: ClassVar[bool] = True

    def __init__(self, amount: Amount, n: Norm, dim: int = -1) -> None:
        validate_amount(amount)
        check_norm(n)
        self.amount = amount
        self.n = n
        self.dim = dim

    def prune_channels_(self, kept: Tensor, scores: Tensor, dim: int) -> None:
        """Set to False the channels whose `scores` have the smallest norms."""
        prune_smallest_(kept, channel_norms(scores, self.n, dim), partial(resolve_amount, self.amount))

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
    ) -> BasePruningMethod:
        """Apply as `BasePruningMethod.apply`, by the norms of `importance_scores` (default: of the parameter)."""
        return super().apply(module, name, amount, n, dim, importance_scores=importance_scores, generator=generator)


torch_prune.RandomStructured.register(RandomStructured)
torch_prune.LnStructured.register(LnStructured)
