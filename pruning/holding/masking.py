"""Masking of tensors: exactly 0 where the mask is 0, also for NaN and inf."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

# The backward of a threshold returns 0 where mask <= 0, else the tensor: one pass, as fast as a product, NaN-safe.
_select = torch.ops.aten.threshold_backward.default
_select_into = torch.ops.aten.threshold_backward.grad_input


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `tensor` with exactly 0 where `mask` is 0, also in place of NaN and inf; differentiable.

    `tensor` may be sparse (a gradient of an embedding); `mask` must be dense, of zeros and ones.
    """
    mask = mask.to(tensor.dtype)
    if tensor.is_sparse:
        indices = tensor._indices()
        return torch.sparse_coo_tensor(
            indices,
            masked(tensor._values(), mask[tuple(indices)]),
            tensor.shape,
            device=tensor.device,
            is_coalesced=tensor.is_coalesced(),
            check_invariants=False,
        )
    if tensor.is_complex():
        return torch.where(mask == 0, torch.zeros_like(tensor), tensor)
    if is_capturing():
        return tensor.masked_fill(mask == 0, 0)
    return cast(Tensor, _select(tensor, mask, 0))


def mask_(tensor: Tensor, mask: Tensor) -> None:
    """Set `tensor` to exactly 0 where `mask` is 0, in place; its version counter changes, its history does not."""
    values = tensor.detach()  # cheaper than `no_grad`: this runs in every training step
    if mask.dtype != values.dtype:
        mask = mask.to(values.dtype)
    if values.is_sparse:
        mask_(values._values(), mask[tuple(values._indices())])
    elif values.is_complex():
        values.masked_fill_(mask == 0, 0)
    else:
        _select_into(values, mask, 0, grad_input=values)


def is_capturing() -> bool:
    """Return whether code is being compiled, exported or traced, when tensors must not be changed in place."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def masked_sparsely(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return the result of `masked`, for a tensor whose gradient may be sparse."""
    return cast(Tensor, _Masked.apply(tensor, mask))  # type: ignore[no-untyped-call]


class _Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor) -> Tensor:
        ctx.save_for_backward(mask)
        return masked(tensor, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (mask,) = ctx.saved_tensors
        return masked(grads[0], mask), None
