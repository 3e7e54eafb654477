"""Which choices cannot be combined, in sentences."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pruning.choices.axes import Choices


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
    if choices.score.kind == "fpgm" and choices.scope.kind == "global":
        raise ValueError(
            "`scope.kind` (='global') ranks filters of all tensors as one, and `score.kind` (='fpgm') sums their "
            "distances within a tensor, which say nothing across; use kind='layer'."
        )
    if choices.scope.allocation == "lamp" and choices.unit.kind != "entry":
        raise ValueError(
            f"`scope.allocation` (='lamp') counts single weights, not units of kind {choices.unit.kind!r}; use 'erk'."
        )
    if choices.select is not None and choices.restart.control == "invert":
        raise ValueError(
            f"`restart.control` (='invert') turns scores round, which `select` (={selected!r}) need not "
            "rank by as they are; use a score."
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
        "repair.kind": (choices.repair.kind, ("none", "bn_stats")),
        "select": (None if choices.select is None else str(choices.select), (None,)),
    }
    for name, (value, allowed) in taken.items():
        if value not in allowed:
            raise ValueError(
                f"`{name}` (={value!r}) cannot be combined with dependency groups, which span tensors; with "
                f"unit.kind='group' it must be {' or '.join(map(repr, allowed))}."
            )
