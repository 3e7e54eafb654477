"""Choices of a round, parsed from the fields of its stage for the engine, and the engine's refusals with typed keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.specs import StageFields
from pruning.catalogue.methods import METHODS
from pruning.catalogue.reconstructions import SOLVERS
from pruning.choices import axes
from pruning.choices.combining import Choices
from pruning.choices.published import PUBLISHED
from pruning.refused import Refused

RANKING = "l1_unstructured"
"""Kind of the method that ranks by a score. A method without a kind does so, too; all other kinds decide themselves."""
TYPED = {"control.kind": "restart.control", "sparsity": "schedule.sparsity", "select": "method.kind"}
"""Choice of the engine -> its key in a configuration; other choices have equal keys."""
OF_A_CLASS = TYPED | {"unit.dim": "method.dim"}
"""The same where a class decides."""


def sentence(error: Refused, *, by_class: bool = False) -> str:
    """Return what the engine says of a choice, with the key as users type it; `by_class` if a class decides."""
    return error.named((OF_A_CLASS if by_class else TYPED).get(error.key, error.key))


def decides_itself(method: Mapping[str, Any]) -> bool:
    """Whether a method is a class that decides which entries to prune, without a score."""
    return method.get("_target_") is not None or method.get("kind") not in (None, RANKING)


def is_by_class(typed: StageFields) -> bool:
    """Whether a class decides in a round with these fields."""
    return typed.amount is not None or decides_itself(vars(typed.method))


def prunes_channels(method: Mapping[str, Any]) -> bool:
    """Whether a method is a built-in class that prunes whole channels."""
    row = METHODS.get(str(method.get("kind")))
    return row is not None and row.channels


def order_of(config: Mapping[str, Any]) -> str:
    """Return the order in which a round prunes its layers; null in the configuration follows the published method.

    Args:
        config: configuration of a trial.
    """
    kind, asked = config["score"].get("kind"), config.get("schedule", {}).get("order")
    if asked is not None or decides_itself(config["method"]):
        return str(asked or "at_once")
    unit, scope = (config.get(axis, {}).get("kind") for axis in ("unit", "scope"))
    unit = "entry" if unit == "block" else unit  # blocks go in the order of single entries
    return "sequential" if kind in SOLVERS else ORDERS.get((kind, unit, scope), "at_once")


ORDERS: Mapping[tuple[Any, ...], str] = {
    (each.choices.score.kind, each.choices.unit.kind, each.choices.scope.kind): each.choices.schedule.order
    for each in reversed([*PUBLISHED.values()])
}
"""Kinds of score, unit and scope -> order of the first published method that has them."""


def choices_of(typed: StageFields) -> Choices:
    """Return the choices of a round, or of a configuration; a custom score or class goes by its target.

    Raises:
        ValueError: a choice has no meaning, or conflicts with another one.
        TypeError: a value has another type.
    """
    by_class = is_by_class(typed)
    scope = axes.Scope(**typed.scope.given)
    sparsity = None if scope.kind == "window" or typed.amount is not None else typed.target
    arguments = typed.method.options if by_class else {}
    return Choices(
        score=axes.Score() if by_class else axes.Score(typed.score.named, typed.score.options),
        unit=axes.Unit() if by_class else axes.Unit(**typed.unit.given),
        scope=scope,
        schedule=axes.Schedule(sparsity, typed.inner, typed.order),
        dynamics=axes.Dynamics(typed.dynamics._target_ or typed.dynamics.kind or "nested", typed.dynamics.options),
        repair=axes.Repair(typed.repair.kind or "none", typed.repair.options),
        control=axes.Control("invert" if typed.restart.control_row.inverts else "none"),
        select=typed.method.named if by_class else None,
        arguments=arguments | ({} if typed.amount is None else {"amount": typed.amount}),
    )
