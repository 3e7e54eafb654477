"""Functions that apply, remove and detect pruning, of one parameter or of many modules together.

The functions for one parameter return its module, and take the keywords of `BasePruningMethod.apply`:
`importance_scores` (of the parameter's shape; None: the parameter) and `generator` (None: torch's default generator).
They raise the errors of `apply`, and do not change the module then.

Global pruning ranks entries or channels of many modules together, and prunes them at once. All arguments are checked
and all masks computed before the first module is changed. A parameter that is named twice counts once. A parameter that
several modules share (tied weights) counts once too, and the modules share one mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from pruning.choices.axes import Amount, resolve_amount
from pruning.holding.parameter import (
    ModuleParameter,
    check_has_values,
    check_prunable,
    check_same_shape,
    drop_vacated,
    is_pruning_hook,
    plain_modules,
    pruned_names,
)
from pruning.holding.reparam import masked
from pruning.methods.base import BasePruningMethod, commit, drawing_from, is_builtin
from pruning.methods.built_in import (
    CustomFromMask,
    Identity,
    L1Unstructured,
    LnStructured,
    RandomStructured,
    RandomUnstructured,
)
from pruning.selection.channel_masks import (
    Norm,
    alive_channels,
    channel_norms,
    check_dim,
    check_structured,
    drop_channels,
)
from pruning.selection.random_subset import prune_random_across_
from pruning.selection.smallest import prune_smallest_across_

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def identity(
    module: ModuleT, name: str, *, importance_scores: Tensor | None = None, generator: torch.Generator | None = None
) -> ModuleT:
    """Reparameterize `module.name` with a mask of ones: prune nothing."""
    Identity.apply(module, name, importance_scores=importance_scores, generator=generator)
    return module


def random_unstructured(
    module: ModuleT,
    name: str,
    amount: Amount,
    *,
    importance_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the unpruned entries of `module.name` at random (see `RandomUnstructured`)."""
    RandomUnstructured.apply(module, name, amount, importance_scores=importance_scores, generator=generator)
    return module


def l1_unstructured(
    module: ModuleT,
    name: str,
    amount: Amount,
    importance_scores: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the unpruned entries of `module.name`, the smallest in magnitude (see `L1Unstructured`)."""
    L1Unstructured.apply(module, name, amount, importance_scores, generator=generator)
    return module


def random_structured(
    module: ModuleT,
    name: str,
    amount: Amount,
    dim: int,
    *,
    importance_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the channels of `module.name` along `dim` at random (see `RandomStructured`)."""
    RandomStructured.apply(module, name, amount, dim, importance_scores=importance_scores, generator=generator)
    return module


def ln_structured(
    module: ModuleT,
    name: str,
    amount: Amount,
    n: Norm,
    dim: int,
    importance_scores: Tensor | None = None,
    *,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `amount` of the channels of `module.name` along `dim`, those of smallest L_n norm (see `LnStructured`)."""
    LnStructured.apply(module, name, amount, n, dim, importance_scores, generator=generator)
    return module


def custom_from_mask(
    module: ModuleT,
    name: str,
    mask: Tensor,
    *,
    importance_scores: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> ModuleT:
    """Prune `module.name` where `mask` (zeros and ones, of its shape) is 0, in addition to its earlier pruning."""
    CustomFromMask.apply(module, name, mask, importance_scores=importance_scores, generator=generator)
    return module


def remove(module: ModuleT, name: str) -> ModuleT:
    """Make the pruning of `module.name` permanent.

    `name` is a parameter again, the same object as `name_orig`, with zeros where the mask was 0. The mask and the hook
    are removed; pruned entries stay 0. Hooks of `torch.nn.utils.prune` are removed as well.

    Raises:
        ValueError: `module.name` is not pruned.
    """
    try:
        parameter = ModuleParameter.of(module, name)
    except AttributeError as error:
        raise ValueError(str(error)) from error
    parameter.release()
    drop_vacated(module)
    return module


def remove_all(model: nn.Module) -> None:
    """Make the pruning of a network permanent: parameters become plain, the same objects with zeros, without hooks."""
    for _, module in plain_modules(model):
        for name in pruned_names(module):
            remove(module, name)


def is_pruned(module: nn.Module) -> bool:
    """Return whether this package or torch pruned a parameter of `module` or of a module in it."""
    return any(
        is_pruning_hook(hook) for submodule in module.modules() for hook in submodule._forward_pre_hooks.values()
    )


Scores = Mapping[tuple[nn.Module, str], Tensor]


def global_unstructured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: type[BasePruningMethod],
    importance_scores: Scores | None = None,
    *,
    generator: torch.Generator | None = None,
    **kwargs: Any,
) -> None:
    """Prune entries of all `parameters` by one ranking.

    Args:
        parameters: pairs (module, name of its parameter).
        pruning_method: a class with `PRUNING_TYPE = 'unstructured'`. A class with its own `compute_mask` gets the
            scores of all unpruned entries as one 1-D tensor.
        importance_scores: (module, name) -> scores of the parameter's shape; other parameters are scored by their own
            values.
        generator: source of random draws; None: torch's default generator.
        kwargs: arguments of `pruning_method`; `amount` is a fraction of all unpruned entries (float), or their number
            (int).

    Raises:
        TypeError: `parameters` is no iterable, `importance_scores` no mapping, or the method not 'unstructured'.
        AttributeError: a module has no such parameter.
        ValueError: scores have another shape, are NaN, or belong to a parameter not in `parameters`; the amount is too
            large; or a parameter has no values (on the meta device).
    """
    if not isinstance(cast(object, pruning_method), type):
        raise TypeError(f"`pruning_method` (={pruning_method!r}) must be a class, for example `L1Unstructured`.")
    method = pruning_method(**kwargs)
    if method.PRUNING_TYPE != "unstructured":
        raise TypeError(
            f"`pruning_method` (={pruning_method.__name__}) must have the PRUNING_TYPE 'unstructured', not "
            f"{method.PRUNING_TYPE!r}; use `global_structured` for channels."
        )
    tied_parameters = _gather(parameters, importance_scores)
    _check_have_values(tied_parameters)
    masks, scores = [tied.copied_mask() for tied in tied_parameters], [tied.entry_scores() for tied in tied_parameters]
    labels = [tied.label for tied in tied_parameters]
    masks = next_masks(method, masks, scores, labels, generator)
    _commit_all(tied_parameters, masks)


def global_structured(
    parameters: Iterable[tuple[nn.Module, str]],
    pruning_method: type[LnStructured] | type[RandomStructured] = LnStructured,
    importance_scores: Scores | None = None,
    *,
    amount: Amount,
    n: Norm = 2,
    dim: int = 0,
    generator: torch.Generator | None = None,
) -> None:
    """Prune whole channels of all `parameters` by one ranking of norms that are normalised by the channel's size.

        score_c = (mean_i |w_ci|^n)^(1/n)        max and min of |w_ci| for n = inf and -inf

    Without normalisation, a channel of many small weights would outrank a channel of few large weights. A module may
    lose all of its channels.

    Args:
        parameters: pairs (module, name of its parameter), each parameter with 2 dimensions or more.
        pruning_method: `LnStructured`, or `RandomStructured` to draw the channels uniformly.
        importance_scores: (module, name) -> scores of the parameter's shape, whose norms are ranked.
        amount: fraction of the channels that are not entirely pruned (float), or their number (int).
        n: order of the norm: a number, inf, -inf or 'fro'.
        dim: dimension whose slices are the channels.
        generator: source of random draws; None: torch's default generator.

    Raises:
        TypeError: `pruning_method` is another class; also as in `global_unstructured`.
        IndexError: a parameter has no dimension `dim`.
        ValueError: a parameter has fewer than 2 dimensions, or `n` is 'nuc'; also as in `global_unstructured`.
    """
    if not (isinstance(pruning_method, type) and issubclass(pruning_method, LnStructured | RandomStructured)):
        raise TypeError(f"`pruning_method` (={pruning_method!r}) must be LnStructured or RandomStructured.")
    if n == "nuc":
        raise ValueError("`n` (='nuc') cannot be normalised by the size of a channel; pass n=2.")
    LnStructured(amount, n, dim)  # validates `amount` and `n`
    tied_parameters = _gather(parameters, importance_scores)
    _check_have_values(tied_parameters)
    for tied in tied_parameters:
        check_structured(tied.first.orig)
    masks = [tied.copied_mask() for tied in tied_parameters]
    alive = [alive_channels(mask, check_dim(mask, dim)) for mask in masks]
    kept = [channels.clone() for channels in alive]
    count = partial(resolve_amount, amount)
    if issubclass(pruning_method, RandomStructured):
        prune_random_across_(kept, count, generator=generator)
    else:
        scores = [tied.channel_scores(mask) for tied, mask in zip(tied_parameters, masks, strict=True)]
        norms = [normalised_norms(score, n, dim) for score in scores]
        prune_smallest_across_(kept, norms, count, names=[tied.label for tied in tied_parameters])
    for mask, before, after in zip(masks, alive, kept, strict=True):
        drop_channels(mask, before & ~after, check_dim(mask, dim))
    _commit_all(tied_parameters, masks)


def prune_by_masks(masks: Mapping[tuple[nn.Module, str], Tensor], *, replace: bool = False) -> None:
    """Prune each parameter (module, name) where its mask is 0; a tied parameter where any of its masks is 0.

    Entries pruned before stay pruned, unless these masks `replace` the earlier ones.
    """
    tied_parameters = _gather(masks, None)
    pruned = [torch.ones_like(t.first.orig.detach()) if replace else t.copied_mask() for t in tied_parameters]
    for tied, mask in zip(tied_parameters, pruned, strict=True):
        for place in tied.places:
            CustomFromMask(masks[place.module, place.name]).prune_(mask, mask)
    _commit_all(tied_parameters, pruned)


def normalised_norms(t: Tensor, n: Norm, dim: int) -> Tensor:
    """Return the power mean of order `n` of each channel's magnitudes: shape (t.shape[dim],), float32 or wider."""
    size = t.numel() // max(t.shape[dim], 1)
    order = 2.0 if isinstance(n, str) else float(n)
    scale = 1.0 if math.isinf(order) else float(size) if order == 0 else size ** (1 / order)
    return channel_norms(t, n, check_dim(t, dim)) / scale


@dataclass
class _TiedParameter:
    """Parameter with all modules that share it, and its given scores."""

    places: list[ModuleParameter]
    given: Tensor | None

    @property
    def first(self) -> ModuleParameter:
        return self.places[0]

    @property
    def label(self) -> str:
        return self.first.label

    def copied_mask(self) -> Tensor:
        """Return a mask to change in place; it keeps the entries that all modules of the parameter keep."""
        if all(place.mask is self.first.mask for place in self.places):
            return self.first.copied_mask()
        combined = torch.ones_like(self.first.orig.detach())
        for place in self.places:
            if place.mask is not None:
                combined.mul_(place.mask)
        return combined

    def entry_scores(self) -> Tensor:
        return (self.first.orig if self.given is None else self.given).detach()

    def channel_scores(self, mask: Tensor) -> Tensor:
        return masked(self.first.orig.detach(), mask) if self.given is None else self.given.detach()

    def plan(self, mask: Tensor) -> Iterator[tuple[BasePruningMethod, ModuleParameter, Tensor]]:
        for place in self.places:
            method = CustomFromMask(mask)
            method._tensor_name = place.name
            yield method, place, mask


def _commit_all(parameters: Sequence[_TiedParameter], masks: Sequence[Tensor]) -> None:
    commit([step for tied, mask in zip(parameters, masks, strict=True) for step in tied.plan(mask)])


def _gather(parameters: Iterable[tuple[nn.Module, str]], importance_scores: Scores | None) -> list[_TiedParameter]:
    """Find all parameters, join tied ones, and check them and their scores before anything is changed."""
    if not isinstance(parameters, Iterable):
        raise TypeError(f"`parameters` (={parameters!r}) must be an iterable of pairs (module, name).")
    given = {} if importance_scores is None else importance_scores
    if not isinstance(given, Mapping):
        raise TypeError("`importance_scores` must map (module, name) to a tensor of scores.")
    pairs = list(dict.fromkeys(map(_pair, parameters)))
    if unknown := [f"{type(module).__name__}.{name}" for module, name in given if (module, name) not in pairs]:
        raise ValueError(f"`importance_scores` has {', '.join(unknown)}, which is not in `parameters`; leave it out.")
    tied_parameters: dict[int, _TiedParameter] = {}
    for module, name in pairs:
        place = ModuleParameter.of(module, name)
        check_prunable(place.label, place.orig)
        scores = given.get((module, name))
        if scores is not None:
            check_same_shape(scores, place.orig, place.label)
        tied = tied_parameters.setdefault(id(place.orig), _TiedParameter([], scores))
        tied.places.append(place)
        tied.given = scores if tied.given is None else tied.given
    return list(tied_parameters.values())


def _check_have_values(parameters: Iterable[_TiedParameter]) -> None:
    for tied in parameters:
        check_has_values(tied.label, tied.first.orig)


def _pair(item: object) -> tuple[nn.Module, str]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise TypeError(f"`parameters` must contain pairs (module, name of its parameter), not {item!r}.")
    return item[0], item[1]


def next_masks(
    method: BasePruningMethod,
    masks: Sequence[Tensor],
    scores: Sequence[Tensor],
    labels: Sequence[str],
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """Return the masks after an 'unstructured' method ranked the entries of all tensors together.

    Args:
        method: pruning method; a built-in method changes `masks` in place.
        masks: nonzero where an entry is unpruned.
        scores: scores with the shapes of the masks.
        labels: names of the tensors in error messages.
        generator: source of random draws; None: torch's default generator.

    Raises:
        ValueError: the method fails; if scores of unpruned entries are NaN, the message names their tensors.
    """
    try:
        with drawing_from(method, generator):
            if not is_builtin(method):
                return _custom_masks(method, masks, scores)
            method.prune_across_(masks, scores)
            return [*masks]
    except ValueError as error:
        undefined = [
            label
            for label, mask, score in zip(labels, masks, scores, strict=True)
            if bool(score[mask != 0].isnan().any())
        ]
        raise ValueError(f"Pruning {', '.join(undefined)}: {error}") if undefined else error from error


def _custom_masks(method: BasePruningMethod, masks: Sequence[Tensor], scores: Sequence[Tensor]) -> list[Tensor]:
    """Pass the scores of all unpruned entries to `method` as one 1-D tensor, and split its mask."""
    alive = [mask != 0 for mask in masks]
    ranked = torch.cat([score[kept] for score, kept in zip(scores, alive, strict=True)])
    computed = method.compute_mask(ranked, default_mask=torch.ones_like(ranked)).detach()
    if computed.shape != ranked.shape or not torch.logical_or(computed == 0, computed == 1).all():
        raise ValueError(
            f"{type(method).__name__} must compute a mask of zeros and ones of shape {tuple(ranked.shape)}."
        )
    parts = torch.split(computed, [int(torch.count_nonzero(kept)) for kept in alive])
    # New tensors, because slices of `computed` would keep its whole memory.
    return [
        torch.zeros_like(mask).masked_scatter_(kept, part.to(mask))
        for mask, kept, part in zip(masks, alive, parts, strict=True)
    ]
