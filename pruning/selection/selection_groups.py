"""Units of pruning (entries, blocks, channels), the pools that rank them, and the exact count that each pool keeps."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pruning.choices.axes import Scope, Unit
from pruning.refused import RefusedValue
from pruning.selection.smallest import best_of_pools, prune_smallest_

_REDUCTIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda entries: entries.sum(1),
    "l1": lambda entries: entries.abs().sum(1),
    "l2": lambda entries: entries.square().sum(1).sqrt(),
    "square_of_sum": lambda entries: entries.sum(1).square(),
}
"""Name of a reduction -> function from entry scores (units, entries) to unit scores (units,)."""


@dataclass(frozen=True)
class Layout:
    """Partition of one tensor into units, and of the units into pools that are ranked separately.

    Args:
        name: name of the parameter in the network.
        shape: shape of the parameter.
        order: the dimensions in the order in which units are counted.
        entries: number of entries of a unit; they are consecutive once the dimensions are in `order`.
        pool: number of consecutive units ranked together; all units for a whole tensor.
    """

    name: str
    shape: torch.Size
    order: tuple[int, ...]
    entries: int
    pool: int

    @property
    def units(self) -> int:
        return self.shape.numel() // max(1, self.entries)

    def by_unit(self, tensor: Tensor) -> Tensor:
        """Reshape `tensor`, of the parameter's shape, to (units, entries)."""
        return tensor.permute(self.order).reshape(self.units, self.entries)

    def by_entry(self, units: Tensor) -> Tensor:
        """Expand one value for each unit, shape (units,), to the parameter's shape."""
        ordered = [self.shape[dim] for dim in self.order]
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        return units[:, None].expand(self.units, self.entries).reshape(ordered).permute(inverse).contiguous()


@dataclass(frozen=True)
class Groups:
    """Units of all tensors to prune, in the network's order; plain data, built by `groups_of`."""

    layouts: tuple[Layout, ...]
    unit: Unit
    scope: Scope

    def __iter__(self) -> Iterator[Layout]:
        return iter(self.layouts)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Name -> number of units."""
        return {layout.name: layout.units for layout in self.layouts}

    def reduce(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> score of each unit, shape (units,), by `unit.reduce` and `scope.normalise`.

        Args:
            scores: name -> scores of the parameter's shape, or already one for each unit, shape (units,).

        Raises:
            ValueError: a tensor has no scores, or scores of another shape.
        """
        reduced = {}
        for layout in self.layouts:
            given = scores.get(layout.name)
            if given is None:
                raise ValueError(
                    f"`scores` lack {layout.name!r}, a tensor to prune; add its scores, or leave the tensor out of "
                    "`parameters`."
                )
            # torch has no absolute value of bools, and squares of bytes overflow.
            given = given.detach() if given.dtype.is_signed else given.to(torch.float64)
            by_entry = given.shape == layout.shape
            if not by_entry and given.shape != (layout.units,):
                raise ValueError(
                    f"`scores[{layout.name!r}]` of shape {tuple(given.shape)} must have the parameter's shape "
                    f"{tuple(layout.shape)}, or one value for each unit, shape ({layout.units},)."
                )
            values = layout.by_unit(given) if by_entry else given[:, None]
            if layout.entries == 1 or not by_entry:
                reduced[layout.name] = values[:, 0]
                continue
            if self.scope.normalise == "size":  # means compare between units of different sizes
                values = values / (layout.entries ** (0.5 if self.unit.reduce == "l2" else 1.0))
            reduced[layout.name] = _REDUCTIONS[self.unit.reduce](values)
        return reduced

    def alive(self, masks: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return name -> bool for each unit, whether any of its entries is unpruned; True without a mask."""
        given = masks or {}
        return {
            layout.name: layout.by_unit(given[layout.name] != 0).any(1).cpu()
            if layout.name in given
            else torch.ones(layout.units, dtype=torch.bool)
            for layout in self.layouts
        }

    def expand(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> bool mask of the parameter's shape from `kept`, name -> bool for each unit, shape (units,)."""
        return {layout.name: layout.by_entry(kept[layout.name]) for layout in self.layouts}


_WITHOUT = "leave the tensor out of `parameters`, in a sweep by prune.exclude=[{}]"


def groups_of(
    shapes: Mapping[str, Sequence[int]],
    unit: Unit | None = None,
    scope: Scope | None = None,
    inputs_first: Container[str] = (),
) -> Groups:
    """Partition tensors of these shapes into units.

    Args:
        shapes: name -> shape of every tensor to prune, in the network's order.
        unit: the units; None is single entries.
        scope: the pools in which units are ranked; None is whole tensors.
        inputs_first: names of tensors whose dimension 0 counts inputs and whose dimension 1 counts outputs.

    Raises:
        ValueError: a tensor, named in the message, is not divisible into blocks or windows, or lacks `unit.dim`.
    """
    unit, scope = unit or Unit(), scope or Scope()
    if unit.spans:
        raise RefusedValue("unit.kind", unit.kind).because(
            "needs the network itself, not shapes alone; call pruning.dependency_groups(model, example, unit)."
        )
    cut = {name: torch.Size(shape) for name, shape in shapes.items()}
    if unit.kind == "channel" and unit.spare_last:
        if len(cut) < 2:
            raise RefusedValue("unit.spare_last", True).because(
                "leaves nothing to prune in a network with one prunable tensor; pass spare_last=False."
            )
        cut.popitem()
    return Groups(
        tuple(_layout(name, shape, unit, scope, name in inputs_first) for name, shape in cut.items()), unit, scope
    )


def _layout(name: str, shape: torch.Size, unit: Unit, scope: Scope, inputs_first: bool) -> Layout:
    natural = tuple(range(len(shape)))
    by_output = (1, 0, *natural[2:]) if inputs_first else natural
    if scope.kind == "window":
        return _windows(name, shape, scope, by_output)
    if unit.kind == "channel":
        if len(shape) < 2 or not -len(shape) <= unit.dim < len(shape):
            raise RefusedValue("unit.dim", unit.dim).because(
                f"must be a channel dimension of every tensor to prune, but {name!r} has the shape {tuple(shape)}; "
                f"pass 0 for output channels, 1 for input channels, or {_WITHOUT.format(name)}."
            )
        dim = unit.dim % len(shape)
        size = shape.numel() // max(shape[dim], 1)
        return Layout(name, shape, (dim, *(d for d in natural if d != dim)), size, shape[dim])
    row = shape.numel() // max(shape[by_output[0]], 1) if len(shape) > 1 else shape.numel()
    size = unit.size if unit.kind == "block" else 1
    if row % size:
        raise RefusedValue("unit.size", size).because(
            f"must divide the weights of one output, but {name!r} of shape {tuple(shape)} has {row}; choose a divisor, "
            f"or {_WITHOUT.format(name)}."
        )
    if scope.kind == "row":
        return Layout(name, shape, by_output, size, row // size)
    return Layout(name, shape, natural if size == 1 else by_output, size, shape.numel() // size)


def _windows(name: str, shape: torch.Size, scope: Scope, by_output: tuple[int, ...]) -> Layout:
    """Partition a tensor into windows of consecutive inputs; in a convolution, of channels at one kernel position."""
    inputs = shape[by_output[1]] if len(shape) > 1 else shape.numel()
    if inputs % scope.m:
        raise RefusedValue("scope.m", scope.m).because(
            f"must divide the input dimension, but {name!r} of shape {tuple(shape)} has {inputs} inputs; choose a "
            f"divisor, or {_WITHOUT.format(name)}."
        )
    order = (by_output[0], *by_output[2:], by_output[1]) if len(shape) > 1 else (0,)
    return Layout(name, shape, order, 1, scope.m)


def select(
    scores: Mapping[str, Tensor],
    groups: Groups,
    counts: Mapping[str, int],
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return name -> bool for each unit, whether it is kept; `Groups.expand` turns the result into masks.

    Args:
        scores: name -> score of each unit, as from `Groups.reduce`; signed scores keep their sign.
        groups: the units.
        counts: name -> units that each pool keeps, as from `allocate`; a pool with fewer survivors keeps them all.
        alive: name -> bool for each unit, whether it may be kept; None means all.

    Raises:
        ValueError: a survivor's score is NaN; the message names the tensor.
    """
    kept = {}
    for layout in groups:
        name = layout.name
        keep = torch.ones(layout.units, dtype=torch.bool) if alive is None else alive[name].clone()
        values = scores[name].detach().cpu()
        if layout.pool < layout.units:
            kept[name] = _by_pool(layout, values, keep, counts[name])
            continue
        survivors = int(keep.sum())
        try:
            kept[name] = prune_smallest_(keep, values, max(0, survivors - counts[name]))
        except ValueError as error:
            raise ValueError(f"Pruning {name}: {error}") from error
    return kept


def _by_pool(layout: Layout, scores: Tensor, alive: Tensor, count: int) -> Tensor:
    """Keep the `count` best survivors of each pool, all pools at once."""
    if bool((scores.isnan() & alive).any()):
        raise ValueError(f"Pruning {layout.name}: its scores hold NaN where an entry is unpruned; repair the tensor.")
    return best_of_pools(scores.view(-1, layout.pool), alive.view(-1, layout.pool), count).view(-1)
