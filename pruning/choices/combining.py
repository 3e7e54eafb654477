"""A pruning method as one of each choice, and which choices go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import Control, Dynamics, Repair, Schedule, Scope, Score, Unit


@dataclass(frozen=True)
class Choices:
    """A pruning method: one of each.

    `select` is a name in `pruning.METHODS`, or a class derived from `BasePruningMethod` (of torch's, too), that stands
    in for the exact ranking: it sees the scores (the weights themselves for "magnitude") and prunes as many as the
    allocation says. `arguments` are the class's, whose `dim` is `unit.dim`; an `amount` among them goes to the class as
    it is, and there is no sparsity then.
    """

    score: Score = field(default_factory=Score)
    unit: Unit = field(default_factory=Unit)
    scope: Scope = field(default_factory=Scope)
    schedule: Schedule = field(default_factory=Schedule)
    dynamics: Dynamics = field(default_factory=Dynamics)
    repair: Repair = field(default_factory=Repair)
    control: Control = field(default_factory=Control)
    select: str | type | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse choices that do not go together."""
        check_combination(self)


def check_combination(choices: Choices) -> None:
    """Raise ValueError for choices of which one has no meaning beside another."""
    select = choices.select
    selected = select if isinstance(select, str | None) else select.__name__
    if choices.scope.kind == "window" and choices.unit.kind != "entry":
        raise ValueError(
            f"`scope.kind` (='window') ranks entries along the input dimension, not units of kind "
            f"{choices.unit.kind!r}; use unit.kind='entry'."
        )
    if choices.scope.kind == "row" and choices.unit.kind == "channel":
        raise ValueError("`scope.kind` (='row') ranks within an output, which a channel fills; use kind='layer'.")
    _check_groups(choices)
    row = SCORES.get(choices.score.kind) if isinstance(choices.score.kind, str) else None
    if row is not None and not row.across_layers and choices.scope.kind == "global":
        raise ValueError(
            f"`scope.kind` (='global') ranks filters of all tensors as one, and `score.kind` (={row.name!r}) compares "
            "them within a tensor only; use kind='layer'."
        )
    if ALLOCATIONS[choices.scope.allocation].ranking and choices.unit.kind != "entry":
        raise ValueError(
            f"`scope.allocation` (={choices.scope.allocation!r}) counts single weights, not units of kind "
            f"{choices.unit.kind!r}; use 'erk'."
        )
    if choices.select is not None and choices.control.kind == "invert":
        raise ValueError(
            f"`control.kind` (='invert') inverts scores, and `select` (={selected!r}) need not rank by scores as they "
            "are; use a score."
        )
    if choices.select is not None and choices.scope.kind == "global" and choices.scope.min_kept:
        raise ValueError(
            f"`scope.min_kept` (={choices.scope.min_kept}) cannot be held where `select` (={selected!r}) ranks "
            "all tensors as one by itself; use a score, or scope.kind='layer'."
        )
    if choices.select is not None and (choices.scope.kind in ("row", "window") or choices.dynamics.kind == "free"):
        raise ValueError(
            f"`select` (={selected!r}) prunes whole tensors further, so that "
            f"scope.kind (={choices.scope.kind!r}) and dynamics.kind (={choices.dynamics.kind!r}) cannot be combined "
            "with it; use a score."
        )


def _check_groups(choices: Choices) -> None:
    """Raise ValueError for what dependency groups alone take, and for what they do not."""
    scope = choices.scope
    if choices.unit.kind != "group":
        for name, plain in (("budget", "channels"), ("round_to", 1)):
            if getattr(scope, name) != plain:
                raise ValueError(
                    f"`scope.{name}` (={getattr(scope, name)!r}) holds for dependency groups, not for units of kind "
                    f"{choices.unit.kind!r}; use unit.kind='group', or leave it at {plain!r}."
                )
        if scope.normalise == "group":
            raise ValueError("`scope.normalise` (='group') needs dependency groups; use unit.kind='group', or 'size'.")
        return
    taken = {
        "scope.kind": (scope.kind, ("layer", "global")),
        "scope.allocation": (scope.allocation, ("each",)),
        "repair.kind": (choices.repair.kind, tuple(name for name, each in REPAIRS.items() if each.spans_tensors)),
        "select": (None if choices.select is None else str(choices.select), (None,)),
    }
    for name, (value, allowed) in taken.items():
        if value not in allowed:
            raise ValueError(
                f"`{name}` (={value!r}) cannot be combined with dependency groups, which span tensors; with "
                f"unit.kind='group' it must be {' or '.join(map(repr, allowed))}."
            )
