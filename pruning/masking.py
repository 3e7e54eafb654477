"""A tensor under its mask: exactly 0 where the mask is 0, NaN and inf included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from pruning import memory, survivors

# The backward of a threshold selects, 0 where mask <= 0 and else the tensor: one pass, as fast as a product, NaN-safe.
_select = torch.ops.aten.threshold_backward.default
_select_into = torch.ops.aten.threshold_backward.grad_input


def masked(tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `tensor` where `mask` is 1 and exactly 0 where it is 0, NaN and inf included; differentiable.

    `tensor` may be sparse (a gradient of an embedding), the mask not.
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
    """Set `tensor` to exactly 0, in place, where `mask` is 0; its version changes, its history does not."""
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
    """Say whether this run is compiled, exported or traced, so that it must not change tensors in place."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def first_masked(tensor: Tensor, mask: Tensor, last: Tensor | None) -> Tensor:
    """Return what `masked` does, for a mask just made: in memory of the mask's kind, its survivors alone where known.

    `last` is what the mask before has left, to be overwritten; None if there is none, or it may still be read.
    """
    if is_capturing() or not memory.is_large(tensor) or mask.dtype != tensor.dtype:
        return masked(tensor, mask)
    known = survivors.recall(mask)
    write: _Write = partial(_select, threshold=0)
    if last is not None and _alike(last, tensor):
        write = partial(_overwrite, last, known)
    elif memory.is_ours(mask):
        write = partial(_write, known)
    value: Tensor = _Masked.apply(tensor, mask, write)  # type: ignore[no-untyped-call]
    if known is not None:
        survivors.note(value, known)
    return value


def same_masked(value: Tensor, tensor: Tensor, mask: Tensor) -> Tensor:
    """Return `value`, which is `tensor` under `mask`, with that for its history; its gradient may be sparse."""
    return cast(Tensor, _Masked.apply(tensor, mask, lambda *_: memory.same(value)))  # type: ignore[no-untyped-call]


_Write: TypeAlias = Callable[[Tensor, Tensor], Tensor]


class _Masked(torch.autograd.Function):
    """What `masked` does, the result being that of `write(tensor, mask)`."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, mask: Tensor, write: _Write) -> Tensor:
        ctx.save_for_backward(mask)
        return write(tensor, mask)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return masked(grads[0], mask), None, None


def _write(known: survivors.Survivors | None, tensor: Tensor, mask: Tensor) -> Tensor:
    if known is not None and tensor.is_contiguous():
        return known.copied_from(tensor)
    return cast(Tensor, _select_into(tensor, mask, 0, grad_input=memory.empty_like(tensor)))


def _overwrite(last: Tensor, known: survivors.Survivors | None, tensor: Tensor, mask: Tensor) -> Tensor:
    into, before = memory.same(last), survivors.recall(last)
    if known is not None and before is not None and tensor.is_contiguous():
        return known.copied_into(into, tensor, before)
    return cast(Tensor, _select_into(tensor, mask, 0, grad_input=into))


def _alike(last: Tensor, tensor: Tensor) -> bool:
    return last.dtype == tensor.dtype and last.shape == tensor.shape and last.stride() == tensor.stride()
