"""Pruning methods as combinations of the seven choices, and checks of which choices go together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias

from pruning.catalogue.allocations import ALLOCATIONS
from pruning.catalogue.reconstructions import RECONSTRUCTIONS, SOLVERS
from pruning.catalogue.repairs import REPAIRS
from pruning.catalogue.scores import SCORES
from pruning.choices.axes import (
    Control,
    Dynamics,
    Repair,
    Schedule,
    Scope,
    Score,
    Unit,
)
from pruning.refused import RefusedType, RefusedValue

Taken: TypeAlias = dict[str, tuple[Any, tuple[Any, ...]]]
"""Key -> its value, and the values that it may have."""


@dataclass(frozen=True)
class Choices:
    """A pruning method: one value for each choice.

    `select` is a name in `pruning.METHODS`, or a class derived from `BasePruningMethod` (this package's or torch's).
    The class replaces the exact ranking: it gets the scores (the weights themselves for "magnitude") and prunes as many
    units as the allocation says. `arguments` are the arguments of the class; a structured class without a `dim`
    among them gets `unit.dim`. An `amount` in `arguments` goes to the class unchanged, and there is no sparsity then.
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
        """Refuse choices of another type, and those that do not go together."""
        kinds: dict[str, Any] = {each.name: each.default_factory for each in fields(self)}
        for name, kind in kinds.items():
            if isinstance(kind, type) and kind is not dict and not isinstance(value := getattr(self, name), kind):
                raise RefusedType(name, value).because(
                    f"must be a {kind.__name__} of pruning.choices.axes; in a call of `prune` type {name}={value!r}."
                )
        check_combination(self)


def check_combination(choices: Choices) -> None:
    """Raise ValueError for choices that exclude each other."""
    select = choices.select
    selected = select if isinstance(select, str | None) else select.__name__
    if choices.scope.kind == "window" and choices.unit.kind != "entry":
        raise RefusedValue("scope.kind", "window").because(
            f"ranks single entries along the input dimension, not units of kind {choices.unit.kind!r}; use "
            "unit.kind='entry'."
        )
    if choices.scope.kind == "row" and choices.unit.kind == "channel":
        raise RefusedValue("scope.kind", "row").because(
            "ranks within the weights of one output, which leaves nothing to rank for unit.kind='channel'; use "
            "kind='layer'."
        )
    _check_fields_of_units(choices)
    _check_groups(choices)
    _check_dynamics(choices)
    _check_order(choices)
    row = SCORES.get(choices.score.kind) if isinstance(choices.score.kind, str) else None
    if row is not None and not row.across_layers and choices.scope.kind == "global":
        raise RefusedValue("scope.kind", "global").because(
            f"ranks filters of all tensors together, but `score.kind` (={row.name!r}) compares filters within a tensor "
            "only; use kind='layer'."
        )
    if row is not None and row.units and choices.unit.kind in ("entry", "block"):
        raise RefusedValue("score.kind", row.name).because(
            f"scores whole channels, not units of kind {choices.unit.kind!r}; use unit.kind='channel' or 'group'."
        )
    if row is not None and row.of_units and choices.unit.kind not in row.of_units:
        raise RefusedValue("score.kind", row.name).because(
            f"scores only whole units of kind {_either(row.of_units)}, not of kind {choices.unit.kind!r}; use "
            f"unit.kind={row.of_units[0]!r}."
        )
    if ALLOCATIONS[choices.scope.allocation].ranking and choices.unit.kind != "entry":
        raise RefusedValue("scope.allocation", choices.scope.allocation).because(
            f"counts single weights, not units of kind {choices.unit.kind!r}; use 'erk'."
        )
    if choices.select is not None and choices.control.kind == "invert":
        raise RefusedValue("control.kind", "invert").because(
            f"inverts scores, but `select` (={selected!r}) may rank by something else; use a score."
        )
    if choices.select is not None and choices.scope.kind == "global" and choices.scope.min_kept:
        raise RefusedValue("scope.min_kept", choices.scope.min_kept).because(
            f"cannot be enforced where `select` (={selected!r}) ranks all tensors together; use a score, or "
            "scope.kind='layer'."
        )
    if choices.select is not None and (choices.scope.kind in ("row", "window") or choices.dynamics.kind == "free"):
        raise RefusedValue("select", selected).because(
            f"prunes only survivors of whole tensors and cannot be combined with scope.kind (={choices.scope.kind!r}) "
            f"and dynamics.kind (={choices.dynamics.kind!r}); use a score, or scope.kind='layer' and "
            "dynamics.kind='nested'."
        )


def _check_fields_of_units(choices: Choices) -> None:
    """Raise ValueError for a setting that the kind of unit does not read."""
    kind, axes = choices.unit.kind, list[Unit | Scope]([choices.unit, choices.scope])
    for axis in axes:
        for each in fields(axis):
            units, value = each.metadata.get("units", each.metadata.get("ranked", (kind,))), getattr(axis, each.name)
            if kind not in units and value != each.default:
                raise RefusedValue(f"{type(axis).__name__.lower()}.{each.name}", value).because(
                    f"is for unit.kind {_either(units)}, and unit.kind is {kind!r}; leave it at {each.default!r}."
                )


def _check_dynamics(choices: Choices) -> None:
    """Raise ValueError for choices that a dynamics within a training does not support."""
    row, plain = choices.dynamics.row, Score().kind
    if not row.in_training:
        return
    taken: Taken = {
        "select": (choices.select, (None,)),
        "unit.kind": (choices.unit.kind, row.units),
        "scope.kind": (choices.scope.kind, row.scopes),
        "repair.kind": (choices.repair.kind, (Repair().kind,)),
        "control.kind": (choices.control.kind, (Control().kind,)),
    }
    if not row.ranks:
        scope = choices.scope
        taken |= {"scope.min_kept": (scope.min_kept, (0,)), "scope.normalise": (scope.normalise, (None,))}
        taken |= {
            "score.kind": (choices.score.kind, (plain,)),
            "scope.allocation": (choices.scope.allocation, ("each",)),
        }
    elif not row.keeps_counts:
        known = tuple(name for name in ALLOCATIONS if name != "given")
        taken["scope.allocation"] = (choices.scope.allocation, known)
    if not row.keeps_counts:
        taken["schedule.inner"] = (choices.schedule.inner, (1,))
    _refuse_others(taken, f"dynamics.kind={row.name!r}, which changes masks within a training;")


def _check_groups(choices: Choices) -> None:
    """Raise ValueError for choices that need dependency groups, or that dependency groups do not support."""
    scope = choices.scope
    if not choices.unit.spans:
        if scope.normalise == "group":
            raise RefusedValue("scope.normalise", "group").because(
                "needs dependency groups; use unit.kind='group', or normalise='size'."
            )
        return
    taken: Taken = {
        "scope.kind": (scope.kind, ("layer", "global")),
        "scope.allocation": (scope.allocation, ("each",)),
        "repair.kind": (choices.repair.kind, tuple(name for name, each in REPAIRS.items() if each.spans_tensors)),
        "select": (None if choices.select is None else str(choices.select), (None,)),
    }
    if choices.unit.kind == "expert":
        taken["scope.kind"] = (scope.kind, ("layer",))
        if scope.budget in ("active_parameters", "macs"):
            raise RefusedValue("scope.budget", scope.budget).because(
                "does not shrink with whole experts, as each token still has as many; use 'channels', 'parameters' or "
                "'bytes', or unit.kind='mlp' for the hidden units of experts."
            )
        taken["scope.round_to"] = (scope.round_to, (1,))
    if choices.unit.parts:
        if scope.budget == "channels":
            raise RefusedValue("scope.budget", "channels").because(
                f"counts units of one kind, and unit.kind={choices.unit.kind!r} removes several; use 'parameters', "
                "'bytes' or 'macs'."
            )
        taken["repair.kind"] = (choices.repair.kind, (Repair().kind,))
        taken["dynamics.kind"] = (choices.dynamics.kind, (Dynamics().kind,))
    if choices.unit.kind == "sizes":
        taken |= {"scope.kind": (scope.kind, ("layer",)), "scope.min_kept": (scope.min_kept, (0,))}
        taken["schedule.sparsity"] = (choices.schedule.sparsity, (None,))
    kind = choices.unit.kind
    _refuse_others(taken, f"dependency groups, which span several tensors; with unit.kind={kind!r}")


def _check_order(choices: Choices) -> None:
    """Raise ValueError for choices that do not go with the order in which layers are pruned."""
    kind, order, scope = choices.score.kind, choices.schedule.order, choices.scope
    if order == "at_once":
        if kind in SOLVERS:
            raise RefusedValue("schedule.order", "at_once").because(
                f"scores all tensors before any is pruned, but score.kind={kind!r} prunes layer by layer; use "
                "order='sequential'."
            )
        return
    rows = {name: row for name, row in RECONSTRUCTIONS.items() if row.reads_data and row.chooses}
    row = rows.get(kind) if isinstance(kind, str) else None
    if row is None and isinstance(kind, str) and "." not in kind:
        raise RefusedValue("schedule.order", "sequential").because(
            f"prunes each layer by its inputs, which score.kind (={kind}) does not do; use a score of "
            f"{', '.join(rows)}, a function (LayerProblem) -> Solution of your own, or order='at_once'."
        )
    ranked = "row" if row is not None and row.by_row else "layer"
    allocations = tuple(name for name, row in ALLOCATIONS.items() if row.by_itself)
    taken: Taken = {
        "select": (choices.select, (None,)),
        "unit.kind": (choices.unit.kind, ("entry", "block")),
        "scope.kind": (scope.kind, (ranked, "window")),
        "scope.allocation": (scope.allocation, allocations),
        "scope.min_kept": (scope.min_kept, (0,)),
        "scope.normalise": (scope.normalise, (None,)),
        "schedule.inner": (choices.schedule.inner, (1,)),
        "dynamics.kind": (choices.dynamics.kind, (Dynamics().kind,)),
        "repair.kind": (choices.repair.kind, (Repair().kind,)),
        "control.kind": (choices.control.kind, (Control().kind,)),
    }
    more = {"scope.kind": f", and scope.allocation {_either(allocations)}"}
    if kind in SCORES:
        more = {name: f"{more.get(name, '')}; or schedule.order must be 'at_once'" for name in taken}
    _refuse_others(taken, f"score.kind={kind!r} in the order 'sequential', layer by layer;", more)


def _refuse_others(taken: Taken, why: str, more: Mapping[str, str] | None = None) -> None:
    """Raise ValueError for the first key with another value than those it may have.

    Args:
        taken: the keys.
        why: what limits the values.
        more: key -> a further condition.
    """
    for name, (value, allowed) in taken.items():
        if value not in allowed:
            rule = f"it must be {_either(allowed)}{(more or {}).get(name, '')}"
            raise RefusedValue(name, value).because(f"cannot be combined with {why} {rule}.")


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(repr, values))
