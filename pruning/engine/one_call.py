"""A published method, or one of your own, in one call."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

from pruning.choices.axes import Choices, Schedule, Score
from pruning.choices.published import PUBLISHED
from pruning.engine.classes import class_of
from pruning.engine.committing import commit
from pruning.engine.plans import Plan, plan
from pruning.engine.scoring import function_of, is_named
from pruning.scores.data import Batches, Loss, Size

NOT_HEEDED = {"schedule": ("rounds", "at"), "restart": ("kind", "step", "rates_from")}
"""What of the choices a training goes by, and one pruning does not."""
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
    example: Any = None,
    **options: Any,
) -> Plan:
    """Prune a network by a method, in place, and return what was decided.

        pruning.prune(model, "snip", sparsity=0.9, batches=[(images, labels)], loss=loss)
        pruning.prune(model, "grasp", sparsity=0.9, batches=batches, loss=loss, temperature=1)
        pruning.prune(model, "magnitude", sparsity=0.9, scope="global", min_kept=10)
        pruning.prune(model, "n_m", n=1, m=4)
        pruning.prune(model, "magnitude", sparsity=0.5, unit="group", budget="macs", example=images)

    Rounds with training in between, and rewinding, are the caller's: call again with the next sparsity. Pruned is what
    masks hold: weights that are 0 without one, as after `remove_all`, rank as any other and are not counted as dead. A
    tensor that has no entry left is warned of.

    Args:
        model: plain, or pruned before. Its parameters are held as by `torch.nn.utils.prune` afterwards; `remove_all`
            makes that permanent.
        method: a name of `pruning.PUBLISHED`; `Choices`; a class derived from `BasePruningMethod`; or a score of your
            own, a function `(model, batches, loss, **_) -> {name: tensor}`.
        sparsity: the fraction of all units to be pruned in the end, dead ones counted; None where the method says it.
        batches, loss, size, generator, parameters, example: see `plan`.
        options: any of the seven choices, as an object, its kind, or a dict of what differs from the method's; what the
            score (or the class) takes, as `temperature`; for scores, a field of one choice alone, as `inner`.

    Raises:
        ValueError: the method is unknown, lacks what it needs, or cannot reach the sparsity, or `options` say what a
            training goes by, as `rounds`; nothing is changed.
    """
    choices = chosen(method, options)
    _refuse_not_heeded(choices, chosen(method))
    if sparsity is not None:
        choices = replace(choices, schedule=replace(choices.schedule, sparsity=sparsity))
    data: dict[str, Any] = {"batches": batches, "loss": loss, "size": size, "generator": generator}
    decided = plan(model, choices, **data, parameters=parameters, example=example)
    commit(model, decided)
    if dead := decided.details["dead"]:
        warnings.warn(
            f"every entry of {', '.join(dead)} is pruned: nothing passes through it; pass a smaller `sparsity`, or "
            "`min_kept`.",
            stacklevel=2,
        )
    return decided


def _refuse_not_heeded(choices: Choices, unchanged: Choices) -> None:
    """Refuse choices beside those of the method that say how a training goes on."""
    for axis, names in NOT_HEEDED.items():
        for name in names:
            value = getattr(getattr(choices, axis), name)
            if value != getattr(getattr(unchanged, axis), name):
                raise ValueError(
                    f"`{axis}.{name}` (={value!r}) says how training and pruning take turns, and `prune` prunes once "
                    "and trains nothing; leave it out, train as you like, and call again with the next `sparsity`."
                )


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
    given = dict(options or {})
    score = _replaced(choices.score, given.pop("score", {}), {})
    kind = class_of(choices)
    taken = inspect.signature(function_of(score) if kind is None else kind).parameters
    single: dict[str, dict[str, Any]] = {axis: {} for axis in AXES}
    own: dict[str, Any] = {}
    for name, value in given.items():
        homes = [axis for axis in AXES if name in {each.name for each in fields(getattr(choices, axis))}]
        if name in AXES:
            continue
        if kind is not None or len(homes) != 1 or (name in taken and not (name == "dim" and is_named(score))):
            own[name] = value
        else:
            single[homes[0]][name] = value
    # All at once: what one of them alone would not allow, another may.
    changed = {n: _replaced(getattr(choices, n), given.get(n, {}), single[n]) for n in AXES if n != "score"}
    if kind is not None:
        return replace(choices, score=score, arguments={**choices.arguments, **own}, **changed)
    return replace(choices, score=replace(score, options={**score.options, **own}), **changed)


def _replaced(choice: Any, given: Any, single: Mapping[str, Any]) -> Any:
    """Return the choice as `given`, with the fields `single` changed besides."""
    if isinstance(given, type(choice)):
        return replace(given, **single)
    if isinstance(given, Mapping):
        if unknown := [name for name in given if name not in {each.name for each in fields(choice)}]:
            raise ValueError(
                f"`{type(choice).__name__.lower()}` has {unknown[0]!r}, but takes "
                f"{', '.join(each.name for each in fields(choice))}."
            )
        return replace(choice, **{**given, **single})
    if isinstance(given, str) or (callable(given) and isinstance(choice, Score)):
        return replace(choice if isinstance(choice, Schedule) else type(choice)(), kind=given, **single)
    raise ValueError(
        f"`{type(choice).__name__.lower()}` (={given!r}) must be a {type(choice).__name__}, the name of its kind, or a "
        "dict of its fields."
    )
