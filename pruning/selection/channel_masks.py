"""Channels, the slices of a tensor along one dimension: their norms and their masks."""

from __future__ import annotations

import math
from numbers import Real
from typing import Literal, SupportsIndex, TypeAlias, cast

import torch
from torch import Tensor

Norm: TypeAlias = int | float | Literal["fro", "nuc"]

TALL = 64
"""Number of rows from which the sum of all rows is much smaller than the tensor."""
AT_ONCE = 1 << 16
"""Entries added at a time, so that they fit a core's second-level cache."""


def check_structured(t: Tensor) -> None:
    """Raise `ValueError` unless `t` has channels, which needs two dimensions or more."""
    if t.dim() < 2:
        raise ValueError(
            f"Structured pruning needs a tensor of 2 dimensions or more, not one of shape {tuple(t.shape)}; "
            "use an unstructured method."
        )


def check_dim(t: Tensor, dim: int) -> int:
    """Return `dim` counted from the front; raise `TypeError` if it is not an int, `IndexError` if out of range."""
    if not isinstance(cast(object, dim), SupportsIndex):
        raise TypeError(f"`dim` (={dim!r}) must be an int, not {type(dim).__name__}.")
    if not -t.dim() <= dim < t.dim():
        raise IndexError(
            f"`dim` (={dim}) must lie in [{-t.dim()}, {t.dim() - 1}] for a tensor of shape {tuple(t.shape)}."
        )
    return dim % t.dim()


def other_dims(t: Tensor, dim: int) -> list[int]:
    """Return all dimensions of `t` except `dim` (counted from the front)."""
    return [d for d in range(t.dim()) if d != dim]


def alive_channels(mask: Tensor, dim: int) -> Tensor:
    """Return a bool for each channel along `dim`: whether any entry of the channel is unpruned."""
    if not mask.numel():
        return torch.zeros(mask.shape[dim], dtype=torch.bool, device=mask.device)
    highest = mask.real if mask.is_complex() else mask
    if dim:  # reducing the dimensions before `dim` first is ten times as fast
        highest = highest.amax(tuple(range(dim)))
    return (highest.flatten(1).amax(1) if highest.dim() > 1 else highest) != 0


def mask_of_channels(kept: Tensor, dim: int, like: Tensor) -> Tensor:
    """Return a mask of the shape, strides and dtype of `like`: 1 in the channels along `dim` where `kept` is True."""
    mask = torch.empty_like(like)
    pattern = kept.to(mask.dtype).view(-1, *[1] * (mask.dim() - dim - 1))
    if dim:  # a contiguous pattern is read in the order in which the mask is written
        pattern = pattern.expand(mask.shape[dim:]).contiguous()
    return mask.copy_(pattern)


def drop_channels(mask: Tensor, channels: Tensor, dim: int) -> None:
    """Set the slices of `mask` along `dim` where the bool tensor `channels` is True to 0, in place."""
    if mask.device.type == "cpu":
        mask.index_fill_(dim, channels.nonzero().squeeze(1), 0)
    else:  # `nonzero` would wait for the device
        mask.masked_fill_(channels.view(-1, *[1] * (mask.dim() - dim - 1)), 0)


def check_norm(n: Norm) -> None:
    """Raise `ValueError` unless `n` is the order of a norm."""
    order = cast(object, n)
    if order not in ("fro", "nuc") and (not isinstance(order, Real) or math.isnan(order)):
        raise ValueError(f"`n` (={n!r}) must be a number, inf, -inf, 'fro' or 'nuc'.")


def channel_norms(t: Tensor, n: Norm, dim: int) -> Tensor:
    """Return the L_n norm of each channel of `t` along `dim`: shape (t.shape[dim],).

        norm_c = (sum_i |t_ci|^n)^(1/n)        max and min of |t_ci| for n = inf and -inf; 'fro' is n = 2

    'nuc' is the sum of singular values; channels are then matrices, so that `t` must have 3 dimensions.

    Raises:
        ValueError: `n` is no number, inf, -inf, 'fro' or 'nuc'; or it is 'nuc' and `t` has not 3 dimensions.
    """
    check_norm(n)
    values = t.detach()
    if not values.is_complex() and (values.element_size() < 4 or not values.is_floating_point()):
        values = values.float()  # a sum of squares overflows in half precision
    dims = other_dims(t, check_dim(t, dim))
    if n == "nuc":
        if len(dims) != 2:
            raise ValueError(
                f"`n` (='nuc') needs channels with 2 dimensions (matrices), and these have {len(dims)}; use n=2."
            )
        return cast(Tensor, torch.linalg.matrix_norm(values, "nuc", (dims[0], dims[1])))
    n = 2 if isinstance(n, str) else n
    if dims[0] == 0 and n in (1, 2) and values.is_contiguous() and _is_tall(values):
        return _norms_by_rows(values, int(n), [d - 1 for d in dims[1:]])
    return cast(Tensor, torch.linalg.vector_norm(values, n, dims))


def _is_tall(t: Tensor) -> bool:
    return t.device.type == "cpu" and t.dtype in (torch.float32, torch.float64) and t.shape[0] >= TALL


def _norms_by_rows(t: Tensor, n: int, dims: list[int]) -> Tensor:
    """Compute the norms of channels that lie across memory: read blocks of rows in memory order, and add them up."""
    total = torch.zeros(t.shape[1:], dtype=torch.float64, device=t.device)
    for rows in t.split(max(1, AT_ONCE * t.shape[0] // t.numel())):  # type: ignore[no-untyped-call]
        total += (rows.abs() if n == 1 else rows * rows).sum(0)
    total = total.sum(dims) if dims else total
    return (total if n == 1 else total.sqrt()).to(t.dtype)
