"""Next mask of a parameter: pass a method the scores that its `PRUNING_TYPE` asks for, and check its mask."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, TypeGuard, cast

import torch
from torch import Tensor

from pruning.holding.parameter import ModuleParameter, check_same_shape
from pruning.holding.reparam import masked
from pruning.selection.channel_masks import alive_channels, check_dim


class MaskMethod(Protocol):
    """Interface of a pruning method of this package or of torch."""

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return the mask of `t`."""


class BuiltinMethod:
    """Mixin of built-in methods, which prune by changing a mask in place with few passes over memory.

    It comes before `BasePruningMethod` among a method's bases. If a subclass overrides `compute_mask`, its
    `compute_mask` is called instead, with the arguments that torch would pass.
    """

    READS_PRUNED: ClassVar[bool] = False
    """Whether the method reads scores of pruned entries, so that the scores must be masked first."""

    def prune_(self, mask: Tensor, scores: Tensor) -> None:
        """Set further entries of `mask` to 0 in place; an error is raised before the mask is changed."""
        self.prune_across_([mask], [scores])

    def prune_across_(self, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> None:
        """Prune like `prune_`, ranking the entries of all tensors together; unstructured methods define this method."""
        raise NotImplementedError(f"{type(self).__name__} does not prune across tensors.")

    def first_mask(self, scores: Tensor, like: Tensor) -> Tensor:
        """Return the first mask of an unpruned tensor, with the shape, strides and dtype of `like`."""
        mask = torch.ones_like(like)
        self.prune_(mask, scores)
        return mask

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        """Return `default_mask` with 0 where this method prunes `t`; all entries of `t` are ranked."""
        return self.first_mask(t, default_mask).mul_(default_mask)


def is_builtin(method: object) -> TypeGuard[BuiltinMethod]:
    """Return whether `method.prune_` applies: `compute_mask` and `PRUNING_TYPE` are not overridden or patched."""
    if not isinstance(method, BuiltinMethod) or type(method).compute_mask is not BuiltinMethod.compute_mask:
        return False
    kinds = [vars(base)["PRUNING_TYPE"] for base in type(method).__mro__ if "PRUNING_TYPE" in vars(base)]
    return not kinds or kinds[-1] == getattr(method, "PRUNING_TYPE", None)


def next_mask(
    method: MaskMethod, parameter: ModuleParameter, importance_scores: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    """Return the next mask of `parameter` by `method`, as a new tensor."""
    if importance_scores is not None:
        check_same_shape(importance_scores, parameter.orig, parameter.label)
    if parameter.orig.is_meta:  # no values to rank: keep the mask; as in torch, a mask can be loaded later
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
    method: MaskMethod, parameter: ModuleParameter, importance_scores: Tensor | None, generator: torch.Generator | None
) -> Tensor:
    orig, before = parameter.orig, parameter.mask
    if before is None:
        scores = orig if importance_scores is None else importance_scores
        with drawing_from(method, generator):
            computed = method.compute_mask(scores, default_mask=torch.ones_like(orig))
        # A copy: the computed mask may be a slice that keeps a larger tensor in memory, or may be shared.
        mask = torch.empty_like(orig.detach()).copy_(_expanded(method, computed, orig))
    else:
        scores = masked(orig, before) if importance_scores is None else importance_scores
        mask = prune_survivors(method, scores, before, generator).to(orig.dtype)
    if not torch.logical_or(mask == 0, mask == 1).all():
        raise ValueError(f"{type(method).__name__} must compute a mask of only zeros and ones.")
    return mask


def prune_survivors(
    method: MaskMethod, t: Tensor, default_mask: Tensor, generator: torch.Generator | None = None
) -> Tensor:
    """Return a new mask: `default_mask` after `method` pruned further entries or channels among the survivors."""
    mask = default_mask.detach().to(dtype=t.dtype, copy=True)
    with drawing_from(method, generator):
        if is_builtin(method):
            method.prune_(mask, t)
        else:
            where = _survivors(method, default_mask)
            before = default_mask.detach().clone()  # slices of the active mask would be views of it
            computed = method.compute_mask(t[where], default_mask=before[where])
            mask[where] = _expanded(method, computed, before[where]).to(mask.dtype)
    return mask


def _expanded(method: MaskMethod, computed: Tensor, like: Tensor) -> Tensor:
    """Return a computed mask, broadcast to the shape of `like`."""
    try:
        return computed.detach().expand_as(like)
    except RuntimeError:
        raise ValueError(
            f"`compute_mask` of {type(method).__name__} returned a mask of shape {tuple(computed.shape)}; it must have "
            f"the shape of its argument `t`, {tuple(like.shape)}."
        ) from None


def _survivors(method: MaskMethod, mask: Tensor) -> Tensor | tuple[slice | Tensor, ...]:
    """Return an index of the entries that `method` may prune next, by its `PRUNING_TYPE`."""
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
        raise AttributeError(f"{type(method).__name__} has PRUNING_TYPE 'structured', so it needs an attribute `dim`.")
    dim = check_dim(mask, method.dim)
    return (*everything[:dim], alive_channels(mask, dim), *everything[dim + 1 :])


@contextmanager
def drawing_from(method: Any, generator: torch.Generator | None) -> Iterator[None]:
    """Set `method.generator` inside the context; it is reset afterwards, because a generator cannot be pickled."""
    if generator is None:
        yield
        return
    if not isinstance(cast(object, generator), torch.Generator):
        raise TypeError(
            f"`generator` (={generator!r}) must be a torch.Generator; pass torch.Generator().manual_seed(seed)."
        )
    before = vars(method).get("generator")
    method.generator = generator
    try:
        yield
    finally:
        if before is None:
            del method.generator
        else:
            method.generator = before
