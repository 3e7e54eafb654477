"""Units of pruning (entries, blocks, channels), the pools that rank them, and the exact count that each pool keeps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from pruning.choices.axes import Scope, Unit
from pruning.layouts import WeightLayout, natural_layout
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
class Partition:
    """Partition of one tensor into units, and of the units into pools that are ranked separately.

    Args:
        name: name of the parameter in the network.
        shape: shape of the parameter.
        unfolded: this shape, or with a dimension of its own for the matrices that lie along dimension 0.
        order: the dimensions of `unfolded` in the order in which units are counted.
        entries: number of entries of a unit; they are consecutive once the dimensions are in `order`.
        pool: number of consecutive units ranked together; all units for a whole tensor.
        padding: number of entries that the last unit along the last dimension of `order` lacks.
        rows: number of consecutive places along the dimension `across` of `order` that a unit spans; the last unit may
            have fewer.
        across: index of this dimension in `order`.
    """

    name: str
    shape: torch.Size
    unfolded: torch.Size
    order: tuple[int, ...]
    entries: int
    pool: int
    padding: int = 0
    rows: int = 1
    across: int = 0

    @property
    def units(self) -> int:
        return math.prod(self._padded) // max(1, self.entries)

    @property
    def index(self) -> Tensor:
        """Index of each entry's unit, int64 of the parameter's shape."""
        return self.by_entry(torch.arange(self.units))

    @property
    def _padded(self) -> list[int]:
        """Sizes of the dimensions in `order`, with the entries that the last units lack."""
        sizes = [self.unfolded[dim] for dim in self.order]
        sizes[-1:] = [size + self.padding for size in sizes[-1:]]
        if self.rows > 1:
            sizes[self.across] += -sizes[self.across] % self.rows
        return sizes

    @property
    def _tiles(self) -> list[int]:
        """Sizes of the dimensions in `order` with those of a unit at the end, outputs and inputs."""
        sizes, width = self._padded, self.entries // self.rows
        sizes[self.across] //= self.rows
        return [*sizes[:-1], sizes[-1] // width, self.rows, width]

    def by_unit(self, tensor: Tensor) -> Tensor:
        """Reshape `tensor`, of the parameter's shape, to (units, entries); entries that a unit lacks are 0."""
        ordered = tensor.reshape(self.unfolded).permute(self.order)
        missing = [padded - size for padded, size in zip(self._padded, ordered.shape, strict=True)]
        ordered = pad(ordered, [each for size in reversed(missing) for each in (0, size)]) if any(missing) else ordered
        if self.rows > 1:
            split = self._tiles
            split.insert(self.across + 1, split.pop(-2))
            ordered = ordered.reshape(split).movedim(self.across + 1, -2)
        return ordered.reshape(self.units, self.entries)

    def by_entry(self, units: Tensor) -> Tensor:
        """Expand one value for each unit, shape (units,), to the parameter's shape."""
        inverse = [self.order.index(dim) for dim in range(len(self.order))]
        found = units[:, None].expand(self.units, self.entries)
        if self.rows > 1:
            found = found.reshape(self._tiles).movedim(-2, self.across + 1)
        found = found.reshape(self._padded)[tuple(slice(self.unfolded[dim]) for dim in self.order)]
        return found.permute(inverse).reshape(self.shape).contiguous()


@dataclass(frozen=True)
class Groups:
    """Units of all tensors to prune, in the network's order; plain data, built by `groups_of`."""

    parts: tuple[Partition, ...]
    unit: Unit
    scope: Scope

    def __iter__(self) -> Iterator[Partition]:
        return iter(self.parts)

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Name -> number of units."""
        return {part.name: part.units for part in self.parts}

    @cached_property
    def limits(self) -> str:
        """Clause on blocks that are single entries, because each output reads one input; empty if there are none."""
        whole = self.unit.size * self.unit.outputs if self.unit.kind == "block" else 1
        single = [each.name for each in self.parts if each.entries == 1 < whole]
        said = f"each output of {', '.join(single)} reads one input: its blocks are single entries; to keep it dense, "
        return said + _WITHOUT.format(", ".join(single)) if single else ""

    def reduce(self, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> score of each unit, shape (units,), by `unit.reduce` and `scope.normalise`.

        Args:
            scores: name -> scores of the parameter's shape, or already one for each unit, shape (units,).

        Raises:
            ValueError: a tensor has no scores, or scores of another shape.
        """
        reduced = {}
        for part in self.parts:
            given = scores.get(part.name)
            if given is None:
                raise ValueError(
                    f"`scores` lack {part.name!r}, a tensor to prune; add its scores, or leave the tensor out of "
                    "`parameters`."
                )
            # torch has no absolute value of bools, and squares of bytes overflow.
            given = given.detach() if given.dtype.is_signed else given.to(torch.float64)
            by_entry = given.shape == part.shape
            if not by_entry and given.shape != (part.units,):
                raise ValueError(
                    f"`scores[{part.name!r}]` of shape {tuple(given.shape)} must have the parameter's shape "
                    f"{tuple(part.shape)}, or one value for each unit, shape ({part.units},)."
                )
            values = part.by_unit(given) if by_entry else given[:, None]
            if part.entries == 1 or not by_entry:
                reduced[part.name] = values[:, 0]
                continue
            if self.scope.normalise == "size":  # means compare between units of different sizes
                is_equal = not part.padding and part.rows == 1
                entries = part.entries if is_equal else part.by_unit(torch.ones_like(given)).sum(1, keepdim=True)
                values = values / (entries ** (0.5 if self.unit.reduce == "l2" else 1.0))
            reduced[part.name] = _REDUCTIONS[self.unit.reduce](values)
        return reduced

    def alive(self, masks: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return name -> bool for each unit, whether any of its entries is unpruned; True without a mask."""
        given = masks or {}
        return {
            part.name: part.by_unit(given[part.name] != 0).any(1).cpu()
            if part.name in given
            else torch.ones(part.units, dtype=torch.bool)
            for part in self.parts
        }

    def expand(self, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return name -> bool mask of the parameter's shape from `kept`, name -> bool for each unit, shape (units,)."""
        return {part.name: part.by_entry(kept[part.name]) for part in self.parts}


_WITHOUT = "leave the tensor out of `parameters`, in a sweep by prune.exclude=[{}]"


def groups_of(
    shapes: Mapping[str, Sequence[int]],
    unit: Unit | None = None,
    scope: Scope | None = None,
    layouts: Mapping[str, WeightLayout | None] | None = None,
) -> Groups:
    """Partition tensors of these shapes into units.

    Args:
        shapes: name -> shape of every tensor to prune, in the network's order.
        unit: the units; None is single entries.
        scope: the pools in which units are ranked; None is whole tensors.
        layouts: name -> layout of the tensor, None if it is unknown; None: outputs first, then inputs, for all.

    Raises:
        ValueError: a tensor, named in the message, is not divisible into windows, lacks `unit.dim`, or has no known
            layout where rows, windows, blocks or channels need one.
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
    known = {name: natural_layout(len(shape)) for name, shape in cut.items()} if layouts is None else layouts
    return Groups(tuple(_partition(name, shape, unit, scope, known[name]) for name, shape in cut.items()), unit, scope)


def _partition(name: str, shape: torch.Size, unit: Unit, scope: Scope, layout: WeightLayout | None) -> Partition:
    natural = tuple(range(len(shape)))
    if unit.kind == "entry" and scope.kind not in ("row", "window"):
        return Partition(name, shape, shape, natural, 1, shape.numel())
    if layout is None or not (layout.is_oriented or unit.kind == "channel"):
        told = (
            "is no weight of a known layer, or of layers that differ"
            if layout is None
            else "does not show which of its sides is outputs"
        )
        key, value = ("unit.kind", unit.kind) if unit.kind != "entry" else ("scope.kind", scope.kind)
        raise RefusedValue(key, value).because(
            f"needs the outputs and inputs of each tensor, but {name!r} of shape {tuple(shape)} {told}; prune it by "
            f"single entries (unit.kind='entry', scope.kind='layer'), or {_WITHOUT.format(name)}."
        )
    if scope.kind == "window":
        return _windows(name, shape, scope, layout)
    if unit.kind == "channel":
        if len(shape) < 2 or not -len(shape) <= unit.dim < len(shape):
            raise RefusedValue("unit.dim", unit.dim).because(
                f"must be a channel dimension of every tensor to prune, but {name!r} has the shape {tuple(shape)}; "
                f"pass 0 for output channels, 1 for input channels, or {_WITHOUT.format(name)}."
            )
        dim = layout.dim(unit.dim)
        size = shape.numel() // max(shape[dim], 1)
        return Partition(name, shape, shape, (dim, *(d for d in natural if d != dim)), size, shape[dim])
    if unit.kind == "block":
        return _blocks(name, shape, unit, layout, by_row=scope.kind == "row")
    return Partition(name, shape, layout.unfolded(shape), layout.by_output, 1, layout.row_entries(shape))


def _blocks(name: str, shape: torch.Size, unit: Unit, layout: WeightLayout, *, by_row: bool) -> Partition:
    """Partition a tensor into blocks of consecutive inputs of consecutive outputs, as `block_index` counts them."""
    unfolded, order, across = layout.unfolded(shape), layout.by_position, layout.stacked
    inputs, outputs = (max(1, unfolded[order[place]]) for place in (-1, across))
    size, rows = min(unit.size, inputs), min(unit.outputs, outputs)
    pool = layout.row_entries(shape) // inputs * math.ceil(inputs / size)
    if not by_row:
        pool *= math.ceil(outputs / rows) * math.prod(unfolded[dim] for dim in order[:across])
    return Partition(name, shape, unfolded, order, rows * size, pool, -inputs % size, rows, across)


def block_index(layout: WeightLayout, shape: Sequence[int], size: int = 4, outputs: int = 1) -> Tensor:
    """Return the index of the block of each entry of a weight, int64 of the weight's shape.

    A block is `size` consecutive inputs of `outputs` consecutive outputs at one kernel position, within a group; the
    last block has fewer where they do not divide. With P positions and B blocks of each, the block of output o,
    position p and input i, each counted from 0, has the index (o // outputs P + p) B + i // size; the outputs of each
    matrix of a stack, and of each group, count from a multiple of `outputs`.

    Args:
        layout: layout of the weight, with known outputs and inputs; matrices of a stack, and groups, count as further
            outputs.
        shape: shape of the weight.
        size: number of inputs of a block.
        outputs: number of outputs of a block.
    """
    return _blocks("", torch.Size(shape), Unit("block", size, outputs), layout, by_row=False).index


def _windows(name: str, shape: torch.Size, scope: Scope, layout: WeightLayout) -> Partition:
    """Partition a tensor into windows of consecutive inputs; in a convolution, of channels at one kernel position."""
    unfolded, order = layout.unfolded(shape), layout.by_position
    inputs = unfolded[order[-1]]
    if inputs % scope.m:
        raise RefusedValue("scope.m", scope.m).because(
            f"must divide the input dimension, but {name!r} of shape {tuple(shape)} has {inputs} inputs; choose a "
            f"divisor, or {_WITHOUT.format(name)}."
        )
    return Partition(name, shape, unfolded, order, 1, scope.m)


def select(
    scores: Mapping[str, Tensor],
    groups: Groups,
    counts: Mapping[str, Any],
    alive: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Return name -> bool for each unit, whether it is kept; `Groups.expand` turns the result into masks.

    Args:
        scores: name -> score of each unit, as from `Groups.reduce`; signed scores keep their sign.
        groups: the units.
        counts: name -> units that each pool keeps, as from `allocate`, a tensor if pools keep different numbers; a pool
            with fewer survivors keeps them all.
        alive: name -> bool for each unit, whether it may be kept; None means all.

    Raises:
        ValueError: a survivor's score is NaN; the message names the tensor.
    """
    kept = {}
    for part in groups:
        name = part.name
        keep = torch.ones(part.units, dtype=torch.bool) if alive is None else alive[name].clone()
        values = scores[name].detach().cpu()
        if part.pool < part.units:
            kept[name] = _by_pool(part, values, keep, counts[name])
            continue
        survivors = int(keep.sum())
        try:
            kept[name] = prune_smallest_(keep, values, max(0, survivors - counts[name]))
        except ValueError as error:
            raise ValueError(f"Pruning {name}: {error}") from error
    return kept


def _by_pool(part: Partition, scores: Tensor, alive: Tensor, count: int | Tensor) -> Tensor:
    """Keep the `count` best survivors of each pool, all pools at once."""
    if bool((scores.isnan() & alive).any()):
        raise ValueError(f"Pruning {part.name}: its scores hold NaN where an entry is unpruned; repair the tensor.")
    return best_of_pools(scores.view(-1, part.pool), alive.view(-1, part.pool), count).view(-1)
