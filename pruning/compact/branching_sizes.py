"""Sizes of inputs at which a forward may take another branch.

One plain call runs with sizes that note what they are compared with. A trace for any sizes would find these conditions,
too, but takes several times as long as the trace that `shrink` needs, and fails for many networks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pruning.compact.tried_inputs import Axis, axes_of
from pruning.graph.tracing import outputs_of
from pruning.holding.copies import to_run
from pruning.measure.macs import Inputs

SCANNED = (*range(1, 1025), *(round(1024 * 1.02**step) for step in range(1, 350)))
"""Sizes at which conditions are evaluated, up to a million."""
Formula: TypeAlias = Callable[[Axis, int], Any]
"""Takes an axis and a new size of it; returns a number, or the outcome of a condition, there."""


def branching_sizes(model: nn.Module, given: Inputs) -> dict[Axis, list[int]]:
    """Return the sizes of each axis, below and above the example's, at which the outcome of a condition changes first.

    Sizes that a forward reads as `len(x)` are plain numbers, which note nothing.

    Args:
        model: network to call; it is not changed.
        given: inputs of the example.
    """
    mode = _NotingSizes(given)
    with suppress(Exception), mode:  # a forward may raise anything
        outputs_of(to_run(model), given)
    conditions = mode.noted.values()
    return {axis: sorted({size for each in conditions for size in _changes(each, axis)}) for axis in axes_of(given)}


def _changes(condition: Formula, axis: Axis) -> Iterator[int]:
    """Yield the next size above and below the example's at which a condition has another outcome."""
    with suppress(ArithmeticError):
        now = condition(axis, axis.size)
        above = (size for size in SCANNED if size > axis.size)
        below = (size for size in reversed(SCANNED) if size < axis.size)
        for sizes in (above, below):
            yield from [size for size in sizes if condition(axis, size) != now][:1]


class _NotingSizes(TorchFunctionMode):
    """Lets a forward see the sizes of tensors as numbers that note what they are compared with.

    A size of an input changes with its axis; others, as of a feature map, are taken to change in proportion.
    """

    def __init__(self, given: Inputs) -> None:
        super().__init__()
        self.noted: dict[Any, Formula] = {}
        self._sizes = {axis.size for axis in axes_of(given)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in READ_SIZES:
            return found
        return torch.Size(map(self._size, found)) if isinstance(found, torch.Size) else self._size(found)

    def _size(self, value: int) -> Any:
        return _noting(value, partial(_in_proportion, value, value in self._sizes), self.noted)


READ_SIZES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement)  # type: ignore[attr-defined]


def _in_proportion(value: int, of_input: bool, axis: Axis, new: int) -> int:
    if of_input:
        return new if value == axis.size else value
    return value * new // axis.size


class _Noting:
    """Number computed from sizes, which notes the outcomes of comparisons.

    Attributes:
        plain: the number.
        formula: its value at other sizes.
        noted: name of a comparison, with both numbers -> its outcome at other sizes.
    """

    plain: Any
    formula: Formula
    noted: dict[Any, Formula]

    def __bool__(self) -> bool:
        return bool(_comparing(operator.ne)(self, 0))

    def __hash__(self) -> int:
        return hash(self.plain)


class _Size(_Noting, int):
    pass


class _Ratio(_Noting, float):
    pass


KINDS: dict[type, Any] = {int: _Size, float: _Ratio}


def _noting(value: Any, formula: Formula, noted: dict[Any, Formula]) -> Any:
    """Return a number that notes comparisons; anything else as it is."""
    if type(value) not in KINDS:
        return value
    number = KINDS[type(value)](value)
    number.plain, number.formula, number.noted = value, formula, noted
    return number


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, _Noting) else value


def _formula(operation: Callable[..., Any], operands: tuple[Any, ...]) -> Formula:
    return lambda axis, new: operation(
        *(each.formula(axis, new) if isinstance(each, _Noting) else each for each in operands)
    )


def _computing(operation: Callable[..., Any], step: int = 1) -> Callable[..., Any]:
    """Return a method of a number that computes another; `step` is -1 if it is the right operand."""

    def compute(self: _Noting, *others: Any) -> Any:
        operands = (self, *others)[::step]
        return _noting(operation(*map(_plain, operands)), _formula(operation, operands), self.noted)

    return compute


def _comparing(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a number that compares it, and notes that."""

    def compare(self: _Noting, other: Any) -> Any:
        if isinstance(other, int | float):
            key = (operation.__name__, self.plain, _plain(other))
            self.noted.setdefault(key, _formula(operation, (self, other)))
        return operation(self.plain, _plain(other))

    return compare


for _each in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    setattr(_Noting, f"__{_each}__", _computing(getattr(operator, _each)))
    setattr(_Noting, f"__r{_each}__", _computing(getattr(operator, _each), -1))
for _operation in (operator.neg, math.floor, math.ceil, round):
    setattr(_Noting, f"__{_operation.__name__}__", _computing(_operation))
for _each in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Noting, f"__{_each}__", _comparing(getattr(operator, _each)))
