"""A published method, or one of your own, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

from pruning.choices.axes import Choices, Schedule, Score
from pruning.choices.published import PUBLISHED
from pruning.engine.committing import commit
from pruning.engine.plans import Plan, plan
from pruning.scores.data import Batches, Loss, Size

AXES = {each.name: each for each in fields(Choices) if each.name not in ("select", "arguments")}


def prune(
    model: nn.Module,
    method: str | Choices | type | Callable[..., Any] = "magnitude",
    *,
    sparsity: float | None = None,
    batches: Batches = None,
    loss: Loss = None,
    size: Size = None,
    generator: torch.Generator | None = None,
    parameters: Iterable[str] | None = None,
    **options: Any,
) -> Plan:
    """Prune a network by a method, in place, and return what was decided.

        pruning.prune(model, "snip", sparsity=0.9, batches=[(images, labels)], loss=loss)
        pruning.prune(model, "grasp", sparsity=0.9, batches=batches, loss=loss, temperature=1)
        pruning.prune(model, "magnitude", sparsity=0.9, scope="global")

    Rounds with training in between, and rewinding, are the caller's: call again with the next sparsity.

    Args:
        model: plain, or pruned before. Its parameters are held as by `torch.nn.utils.prune` afterwards; `remove_all`
            makes that permanent.
        method: a name of `pruning.PUBLISHED`; `Choices`; a class derived from `BasePruningMethod`; or a score of your
            own, a function `(model, batches, loss, **_) -> {name: tensor}`.
        sparsity: the fraction of all units to be pruned in the end, dead ones counted; None where the method says it.
        batches, loss, size, generator, parameters: see `plan`.
        options: any of the seven choices, as an object, its kind, or a dict of what differs from the method's; all
            others go to the score, or to the class.

    Raises:
        ValueError: the method is unknown, lacks what it needs, or cannot reach the sparsity; nothing is changed.
    """
    choices = chosen(method, options)
    if sparsity is not None:
        choices = replace(choices, schedule=replace(choices.schedule, sparsity=sparsity))
    decided = plan(model, choices, batches=batches, loss=loss, size=size, generator=generator, parameters=parameters)
    commit(model, decided)
    return decided


def chosen(method: str | Choices | type | Callable[..., Any], options: Mapping[str, Any] | None = None) -> Choices:
    """Return the choices that a method stands for, with what `options` say otherwise; see `prune`."""
    if isinstance(method, Choices):
        choices = method
    elif isinstance(method, type) and issubclass(method, torch_prune.BasePruningMethod):
        choices = Choices(select=method)
    elif isinstance(method, str):
        if method not in PUBLISHED:
            raise ValueError(f"`method` (={method!r}) must be one of {', '.join(PUBLISHED)}; or a function or class.")
        choices = PUBLISHED[method]
    elif callable(method):
        choices = Choices(Score(method))
    else:
        raise ValueError(f"`method` (={method!r}) must be a name, `Choices`, a class or a function.")
    own = {name: value for name, value in (options or {}).items() if name not in AXES}
    changed = {
        name: _replaced(getattr(choices, name), value) for name, value in (options or {}).items() if name in AXES
    }
    choices = replace(choices, **changed)
    if not own:
        return choices
    if choices.select is not None:
        return replace(choices, arguments={**choices.arguments, **own})
    return replace(choices, score=replace(choices.score, options={**choices.score.options, **own}))


def _replaced(choice: Any, given: Any) -> Any:
    if isinstance(given, type(choice)):
        return given
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in {each.name for each in fields(choice)}]:
            raise ValueError(
                f"`{type(choice).__name__.lower()}` has {unknown[0]!r}, but takes "
                f"{', '.join(each.name for each in fields(choice))}."
            )
        return replace(choice, **given)
    if isinstance(given, str) or (callable(given) and isinstance(choice, Score)):
        return type(choice)(kind=given) if not isinstance(choice, Schedule) else replace(choice, kind=given)
    raise ValueError(
        f"`{type(choice).__name__.lower()}` (={given!r}) must be a {type(choice).__name__}, the name of its kind, or a "
        "dict of its fields."
    )
