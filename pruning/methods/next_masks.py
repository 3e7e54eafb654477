"""What a method decides: the next mask of a parameter, by what `PRUNING_TYPE` lets the method see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from pruning.holding.masking import masked
from pruning.holding.parameter import ModuleParameter, check_same_shape
from pruning.selection.channel_masks import alive_channels, check_dim


class Decides(Protocol):
    """What is asked of a method, of this package or of torch."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return the mask of `t`."""


class BuiltinMethod:
    """What a method decides that prunes by marking entries of a mask in place, touching no more than it must.

    It stands before `BasePruningMethod` among a method's bases. Where a subclass replaces `compute_mask`, that is what
    is called, with what torch would pass it.
    """

    READS_PRUNED: ClassVar[bool] = False
    """Whether scores of pruned entries matter, so that they must be masked first."""

    def prune_(self, mask: Tensor, scores: Tensor) -> None:
        """Set to 0, in place, what is pruned next of the entries still nonzero in `mask`; raise before writing."""
        self.prune_across_([mask], [scores])

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:
        """As `prune_`, with the entries of all tensors ranked as one: an unstructured method defines this one."""
        raise NotImplementedError(f"{type(self).__name__} does not prune across tensors.")

    def first_mask(self, scores: Tensor, like: Tensor) -> Tensor:
        """Return the mask of a tensor that was never pruned, of the shape, strides and dtype of `like`."""
        mask = torch.ones_like(like)
        self.prune_(mask, scores)
        return mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` without what this method prunes of `t`, every entry of `t` being eligible."""
        return self.first_mask(t, default_mask).mul_(default_mask)


def is_builtin(method: object) -> TypeGuard[BuiltinMethod]:
    """Say whether `method.prune_` decides: no subclass has another `compute_mask` (or a patch), or `PRUNING_TYPE`."""
    if not isinstance(method, BuiltinMethod) or type(method).compute_mask is not BuiltinMethod.compute_mask:
        return False
    kinds = [vars(base)["PRUNING_TYPE"] for base in type(method).__mro__ if "PRUNING_TYPE" in vars(base)]
    return not kinds or kinds[-1] == getattr(method, "PRUNING_TYPE", None)


def next_mask(
    method: Decides, parameter: ModuleParameter, importance_scores: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Return the mask of `parameter` after `method`, a new tensor."""
    if importance_scores is not None:
        check_same_shape(importance_scores, parameter.orig, parameter.label)
    if parameter.orig.is_meta:  # no entry has a value yet: as after a first call of torch's, the mask will be loaded
        return parameter.copied_mask()
    try:
        if not is_builtin(method):
            return _custom_mask(method, parameter, importance_scores, generator)
        scores = parameter.orig if importance_scores is None else importance_scores
        if importance_scores is None and parameter.mask is not None and method.READS_PRUNED:
            scores = masked(parameter.orig.detach(), parameter.mask)
        with drawing_from(method, generator):
            if parameter.mask is None:
                return method.first_mask(scores.detach(), parameter.orig.detach())
            mask = parameter.copied_mask()
            method.prune_(mask, scores.detach())
        return mask
    except ValueError as error:
        raise ValueError(f"Pruning {parameter.label}: {error}") from error


def _custom_mask(
    method: Decides, parameter: ModuleParameter, importance_scores: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    orig, before = parameter.orig, parameter.mask
    if before is None:
        scores = orig if importance_scores is None else importance_scores
        with drawing_from(method, generator):
            computed = method.compute_mask(scores, default_mask=torch.ones_like(orig))
        # A copy: what comes back may be cut from a larger tensor, which it would keep, or belong to someone else.
        mask = torch.empty_like(orig.detach()).copy_(_spread(method, computed, orig))
    else:
        scores = masked(orig, before) if importance_scores is None else importance_scores
        mask = prune_survivors(method, scores, before, generator).to(orig.dtype)
    if not torch.logical_or(mask == 0, mask == 1).all():
        raise ValueError(f"{type(method).__name__} must compute a mask of zeros and ones only.")
    return mask


def prune_survivors(
    method: Decides, t: Tensor, default_mask: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return a new mask: `default_mask` without what `method` prunes of the entries or channels still unpruned."""
    mask = default_mask.detach().to(dtype=t.dtype, copy=True)
    with drawing_from(method, generator):
        if is_builtin(method):
            method.prune_(mask, t)
        else:
            where = _survivors(method, default_mask)
            before = default_mask.detach().clone()  # not the mask in force: the index may be of slices
            computed = method.compute_mask(t[where], default_mask=before[where])
            mask[where] = _spread(method, computed, before[where]).to(mask.dtype)
    return mask


def _spread(method: Decides, computed: Tensor, like: Tensor) -> Tensor:
    """Return a computed mask in the shape of `like`, which it may be broadcast to."""
    try:
        return computed.detach().expand_as(like)
    except RuntimeError:
        raise ValueError(
            f"`compute_mask` of {type(method).__name__} must return a mask of the shape of what it was given, "
            f"{tuple(like.shape)}, got {tuple(computed.shape)}."
        ) from None


def _survivors(method: Decides, mask: Tensor) -> Tensor | tuple[slice | Tensor, ...]:
    """Return the index of what `method` may still prune, by its `PRUNING_TYPE`."""
    kind = getattr(method, "PRUNING_TYPE", None)
    if kind == "unstructured":
        return mask == 1
    everything = (slice(None),) * mask.dim()
    if kind == "global":
        return everything
    if kind != "structured":
        raise ValueError(
            f"`PRUNING_TYPE` (={kind!r}) of {type(method).__name__} must be 'unstructured', 'structured' or 'global'."
        )
    if not hasattr(method, "dim"):
        raise AttributeError(f"{type(method).__name__} is 'structured', so it needs an attribute `dim`.")
    dim = check_dim(mask, method.dim)
    return (*everything[:dim], alive_channels(mask, dim), *everything[dim + 1 :])


@contextmanager
def drawing_from(method: Any, generator: torch.Generator | None) -> Iterator[None]:
    """Let `method` draw from `generator` for a while; it is not kept, since a generator cannot be pickled."""
    if generator is None:
        yield
        return
    if not isinstance(cast(object, generator), torch.Generator):
        raise TypeError(f"`generator` (={generator!r}) must be a torch.Generator; make one by `manual_seed`.")
    before = vars(method).get("generator")
    method.generator = generator
    try:
        yield
    finally:
        if before is None:
            del method.generator
        else:
            method.generator = before
