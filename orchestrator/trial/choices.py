"""Choices of a round, parsed from the fields of its stage for the engine, and the engine's refusals with typed keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.core.specs import OF_SCORING_DATA, StageFields
from pruning.catalogue.dynamics import DYNAMICS
from pruning.catalogue.methods import METHODS
from pruning.catalogue.reconstructions import SOLVERS
from pruning.choices import axes
from pruning.choices.combining import Choices
from pruning.errors import Refused

RANKING = "l1_unstructured"
"""Kind of the method that ranks by a score. A method without a kind does so, too; all other kinds decide themselves."""
NOT_OPTIONS = ("name", "kind", "_target_", "depends")
"""Keys of a component that are not options of its code."""
INFINITIES = ("inf", "-inf")
"""Notation of infinities in a configuration: JSON has no infinity."""
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


def is_by_class(fields: Mapping[str, Any]) -> bool:
    """Whether a class decides in a round with these fields."""
    return fields.get("amount") is not None or decides_itself(fields.get("method", {}))


def prunes_channels(method: Mapping[str, Any]) -> bool:
    """Whether a method is a built-in class that prunes whole channels."""
    row = METHODS.get(str(method.get("kind")))
    return row is not None and row.channels


def order_of(order: str | None, score: Mapping[str, Any], method: Mapping[str, Any]) -> str:
    """Return the order in which a round prunes its layers; null in the configuration follows the score."""
    is_solver = score.get("kind") in SOLVERS and not decides_itself(method)
    return str(order or ("sequential" if is_solver else "at_once"))


def scored_as(score: Mapping[str, Any], at: str, dynamics: str | None) -> Mapping[str, Any]:
    """Replace a null `batch_norm` of a score by its default: `train` before the training, else `eval`."""
    if score.get("batch_norm", "") is not None:
        return score
    row = DYNAMICS.get(str(dynamics))
    before = at == "start" or (at == "during" and row is not None and row.keeps_counts)
    return {**score, "batch_norm": "train" if before else "eval"}


def choices_of(fields: Mapping[str, Any], typed: StageFields) -> Choices:
    """Return the choices of a round, or of a configuration; a custom score or class goes by its target.

    Args:
        fields: the plain data.
        typed: the typed fields of the same data.

    Raises:
        ValueError: a choice has no meaning, or conflicts with another one.
        TypeError: a value has another type.
    """
    by_class, repair = is_by_class(fields), fields.get("repair", {})
    method = {} if not by_class else _options(fields.get("method", {}))
    score = _options({n: value for n, value in fields.get("score", {}).items() if n not in OF_SCORING_DATA})
    unit = {} if by_class else fields.get("unit", {})
    scope = axes.Scope(**fields.get("scope", {}))
    sparsity = None if scope.kind == "window" or typed.amount is not None else typed.target
    return Choices(
        score=axes.Score() if by_class else axes.Score(typed.score.named, score),
        unit=axes.Unit(**unit),
        scope=scope,
        schedule=axes.Schedule(sparsity, typed.inner, typed.order),
        dynamics=axes.Dynamics(
            typed.dynamics._target_ or typed.dynamics.kind or "nested", _options(fields.get("dynamics", {}))
        ),
        repair=axes.Repair(repair.get("kind") or "none", _options(repair)),
        control=axes.Control("invert" if typed.restart.control_row.inverts else "none"),
        select=typed.method.named if by_class else None,
        arguments=method | ({} if typed.amount is None else {"amount": typed.amount}),
    )


def _options(node: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options for a component's code, with infinities as numbers."""
    found = {name: value for name, value in node.items() if name not in NOT_OPTIONS}
    return {name: float(value) if value in INFINITIES else value for name, value in found.items()}
