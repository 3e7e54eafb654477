"""Select step by a pruning method class: a class of `pruning.METHODS`, a custom class, or a class of torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.utils.prune as torch_prune
from torch import Tensor, nn

from pruning.catalogue.methods import METHODS
from pruning.choices.combining import Choices
from pruning.holding.parameter import ModuleParameter
from pruning.methods.base import BasePruningMethod, PruningContainer, next_mask
from pruning.methods.functions import next_masks
from pruning.refused import RefusedValue
from pruning.scores.readings.network import Weight
from pruning.selection.allocation import allocate, check_reachable, kept_of_all
from pruning.selection.selection_groups import Groups

_HOLDERS = (torch_prune.PruningContainer, PruningContainer, torch_prune.BasePruningMethod, BasePruningMethod)


def class_of(choices: Choices) -> type[BasePruningMethod] | None:
    """Return the class that `choices.select` is or names; None if it is None."""
    select = choices.select
    if select is None:
        return None
    kind = (METHODS[select].load() if select in METHODS else None) if isinstance(select, str) else select
    if kind is None or not issubclass(kind, torch_prune.BasePruningMethod) or kind in _HOLDERS:
        raise RefusedValue("select", select).because(
            f"must be a subclass of BasePruningMethod that prunes by itself, or one of {', '.join(METHODS)}."
        )
    return cast(type[BasePruningMethod], kind)


def with_unit_of_class(choices: Choices) -> Choices:
    """Return the choices with channels as the unit, along the class's dimension, where the class prunes channels.

    Raises:
        ValueError: the class would count units of another kind than those that it prunes.
    """
    if (kind := class_of(choices)) is None:
        return choices
    own = "channel" if _is_structured(kind) else "entry"
    if choices.unit.kind not in ("entry", own):
        raise RefusedValue("unit.kind", choices.unit.kind).because(
            f"is for methods that rank by a score, but {kind.__name__} selects by itself; use a score, as "
            f"method='magnitude' does, or unit.kind={own!r}."
        )
    if own == "entry":
        return choices
    return replace(
        choices, unit=replace(choices.unit, kind="channel", dim=choices.arguments.get("dim", choices.unit.dim))
    )


def masks_of_class(
    choices: Choices,
    cut: Groups,
    sparsity: float | None,
    weights: Mapping[str, Weight],
    scores: Mapping[str, Tensor] | None,
    generator: torch.Generator | None,
    *,
    capped: bool = False,
) -> dict[str, Tensor]:
    """Return the masks that the class's own `compute_mask` makes: name -> bool of the parameter's shape, on the CPU.

    Args:
        choices: `select` and its `arguments`; an `amount` in `arguments` is passed to the class unchanged.
        cut: tensors to prune, in the units that the class counts.
        sparsity: fraction of all units; None if the allocation or the class decides it.
        weights: the parameters, and their masks so far.
        scores: name -> scores of the parameter's shape; None: the class gets the values of the parameters.
        generator: source of random draws.
        capped: see `allocate`.

    Raises:
        ValueError: the class does not take its arguments, cannot prune in this scope, or cannot reach the sparsity.
    """
    kind = class_of(choices)
    assert kind is not None
    takes_count = "amount" not in choices.arguments and (_takes(kind, "amount") or _takes_amount_first(kind))
    if choices.scope.min_kept and not takes_count:
        raise RefusedValue("scope.min_kept", choices.scope.min_kept).because(
            f"must be 0 for {kind.__name__}: the engine passes it no `amount`, so the class decides how many entries "
            "it keeps; type 0."
        )
    held = {name: _parameter(weights[name]) for name in cut.sizes}
    given = {name: None if scores is None else scores[name].to(held[name].orig.device) for name in held}
    survivors = {n: int(a.sum()) for n, a in cut.alive({n: p.copied_mask() for n, p in held.items()}).items()}
    if choices.scope.kind == "global":
        if kind.PRUNING_TYPE != "unstructured":
            raise RefusedValue("scope.kind", "global").because(
                f"must not be 'global' for {kind.__name__}, whose PRUNING_TYPE is {kind.PRUNING_TYPE!r}: a global "
                "ranking needs single entries; type 'layer'."
            )
        budget = kept_of_all(cut, sparsity) if takes_count else 0
        if takes_count:
            check_reachable(budget, dict.fromkeys(survivors, 0), survivors)
        method = _build_method(kind, choices, sum(survivors.values()) - budget)
        before = [parameter.copied_mask() for parameter in held.values()]
        seen = [parameter.orig if given[n] is None else given[n] for n, parameter in held.items()]
        masks = next_masks(method, before, [s.detach() for s in seen if s is not None], list(held), generator)
        return {name: (mask != 0).cpu() for name, mask in zip(held, masks, strict=True)}
    counts = survivors
    if takes_count:
        alive = {n: torch.arange(cut.sizes[n]) < count for n, count in survivors.items()}
        counts = allocate(cut, sparsity, None, alive, capped=capped)
    found = {}
    for name, parameter in held.items():
        amount = survivors[name] - counts[name]
        method = _build_method(kind, choices, amount, weights[name])
        try:
            found[name] = (next_mask(method, parameter, given[name], generator) != 0).cpu()
        except Exception as error:
            told = f" with amount={amount}, a number of entries and not a fraction" if takes_count else ""
            error.add_note(f"while pruning {name}{told}")
            raise
    return found


def _is_structured(kind: type | None) -> bool:
    return getattr(kind, "PRUNING_TYPE", None) == "structured"


def _parameter(weight: Weight) -> ModuleParameter:
    orig = weight.parameter
    assert isinstance(orig, nn.Parameter)
    mask = None if weight.kept is None else torch.empty_like(orig.detach()).copy_(weight.kept)
    return ModuleParameter(weight.module, weight.leaf, orig, mask, None)


def _build_method(
    kind: type[BasePruningMethod], choices: Choices, amount: int, weight: Weight | None = None
) -> BasePruningMethod:
    own: dict[str, Any] = {"amount": max(0, amount), **choices.arguments}
    if _is_structured(kind) and weight is not None and weight.layout is not None:
        own["dim"] = weight.layout.dim(choices.unit.dim)
    named = {name: value for name, value in own.items() if name in choices.arguments or _takes(kind, name)}
    first = [named.pop("amount", own["amount"])] if _takes_amount_first(kind) else []
    try:
        return kind(*first, **named)
    except TypeError as error:
        raise RefusedValue("arguments", dict(choices.arguments)).because(
            f"do not fit {kind.__name__}: {error}."
        ) from error


def _takes(kind: type, name: str) -> bool:
    """Return whether a class takes an argument by name, be it by `**kwargs`."""
    taken = inspect.signature(kind).parameters
    return name in taken or any(each.kind is each.VAR_KEYWORD for each in taken.values())


def _takes_amount_first(kind: type) -> bool:
    """Return whether a class takes its amount by position alone: as the first of its `*args`."""
    first = next(iter(inspect.signature(kind).parameters.values()), None)
    return first is not None and first.kind is first.VAR_POSITIONAL and not _takes(kind, "amount")
