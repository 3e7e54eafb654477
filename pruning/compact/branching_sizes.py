"""Sizes of inputs at which a forward may take another branch.

A plain call runs with sizes that note what they are compared with. A trace for any sizes would find these conditions,
too, but takes several times as long as the trace that `shrink` needs, and fails for many networks.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from pruning.compact.tried_inputs import Axis, axes_of
from pruning.graph.input_guard import NAMES
from pruning.graph.tracing import first_line, outputs_of
from pruning.holding.parameter import hooked
from pruning.measure.macs import Inputs

SCANNED = np.unique(np.round([*range(1, 2049), *(2048 * 1.02 ** np.arange(1, 314)), *(2.0 ** np.arange(20))]))
"""Sizes at which conditions are evaluated, up to a million."""
MOST_NOTED = 1000
"""Number of different comparisons that are noted in a call."""
BATCH = re.compile(r"\w+\.shape\[0\]")
"""Size of a batch in a condition of a trace."""
MOST_GUESSES = 3
"""Number of calls from which the other outcome of a condition is sought."""
Change: TypeAlias = tuple[Axis, int]
"""Axis, and a size of it."""
Values: TypeAlias = NDArray[Any]
"""Values of a number, or outcomes of a condition: (axes, scanned sizes), each for one axis of another size."""


@dataclass(frozen=True)
class Condition:
    """Comparisons at one place in the code.

    Args:
        outcomes: their outcomes in a call.
        changes: first sizes above and below the present one at which one of them has another outcome.
    """

    outcomes: set[bool] = field(default_factory=set)
    changes: set[Change] = field(default_factory=set)


@dataclass(frozen=True)
class NotedCall:
    """A call of a network, and where its conditions have another outcome.

    Args:
        outputs: outputs of the network.
        conditions: place in the code -> outcomes of the condition there, and where they change.
        failure: why sizes could not be noted to the end of the call; "" if they could.
    """

    outputs: list[Tensor]
    conditions: Mapping[Any, Condition]
    failure: str = ""


def noted_call(model: nn.Module, given: Inputs) -> NotedCall:
    """Call a network with sizes that note comparisons.

    Sizes that a forward reads as `len(x)`, `int(n)` or by a table of numbers are plain numbers, which note nothing.
    """
    noted = _Noted(axes_of(given, single=True))
    mode = _NotingSizes(model, noted)
    try:
        with hooked([model.register_forward_pre_hook(mode.enter, prepend=True, with_kwargs=True)]), mode:
            outputs = outputs_of(model, given)
        failure = f"it compares sizes in more than {MOST_NOTED} ways" if len(noted.outcomes) == MOST_NOTED else ""
    except Exception as error:  # a forward may raise anything
        outputs, failure = outputs_of(model, given), first_line(error)
    return NotedCall(outputs, noted.conditions(), failure)


def changes_of_batch(rules: Iterable[str], given: Inputs) -> set[Change]:
    """Return the batches at which conditions of a trace, such as `x.shape[0] < 100`, fail first."""
    noted = _Noted([axis for axis in axes_of(given) if not axis.inner])
    of_batch = (text for rule in rules if ".shape[" not in (text := BATCH.sub("new", rule)))  # others read other sizes
    for rule in of_batch:
        condition = eval(f"lambda new: {rule}", NAMES)
        with suppress(ArithmeticError):
            held = [bool(condition(int(new))) for new in SCANNED]
            noted.outcomes[rule, ()] = True, np.array([held] * len(noted.axes))
    return {change for each in noted.conditions().values() for change in each.changes}


class ConditionsMet:
    """Conditions that calls have met so far: whether both outcomes of each are known."""

    def __init__(self) -> None:
        self._outcomes = defaultdict[Any, set[bool]](set)
        self._calls = Counter[Any]()

    def unmet(self, call: NotedCall) -> list[Change]:
        """Return changes of conditions that are new, or of which the calls so far know one outcome alone.

        Sizes of feature maps are guessed, so that a condition may keep its outcome where it should change.
        """
        found = set[Change]()
        for place, condition in call.conditions.items():
            self._outcomes[place] |= condition.outcomes
            known = self._calls[place] and len(self._outcomes[place]) == 2
            if not known and self._calls[place] < MOST_GUESSES:
                self._calls[place] += 1
                found |= condition.changes
        return sorted(found, key=lambda change: (-len(change[0].places), sorted(change[0].places), change[1]))


@dataclass
class _Noted:
    """Comparisons of a call: its place in the code and both numbers -> outcome now, and those at other sizes."""

    axes: list[Axis]
    outcomes: dict[Any, tuple[bool, Values]] = field(default_factory=dict)

    def conditions(self) -> dict[Any, Condition]:
        """Return place -> its condition."""
        found = defaultdict[Any, Condition](Condition)
        for (place, _), (now, outcomes) in self.outcomes.items():
            found[place].outcomes.add(now)
            for axis, own in zip(self.axes, outcomes, strict=True):
                other = SCANNED[own != now]
                above, below = other[other > axis.size], other[other < axis.size]
                found[place].changes.update((axis, int(size)) for size in (*above[:1], *below[-1:]))
        return found


READ_SIZES = (
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.numel,
    Tensor.nelement,
    torch.numel,
)


class _NotingSizes(TorchFunctionMode):
    """Lets a forward see the sizes of tensors as numbers that note what they are compared with.

    Sizes of inputs change with their axis, those of tensors that modules hold never; sizes of other tensors, as of a
    feature map, are taken to be those of an input that they equal, or else to change in proportion.
    """

    def __init__(self, model: nn.Module, noted: _Noted) -> None:
        super().__init__()
        self._noted = noted
        held = (each for module in model.modules() for each in vars(module).values())
        self._fixed = {id(each) for each in (*model.parameters(), *model.buffers(), *held)}
        self._inputs: dict[int, int] = {}
        self._known: dict[int, Values] = {}

    def enter(self, _module: nn.Module, args: Any, kwargs: Any) -> None:
        """Note which tensors are the inputs; a forward pre-hook with keyword arguments."""
        self._inputs = {id(leaf): number for number, leaf in enumerate(tree_leaves((args, kwargs)))}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in READ_SIZES or not args or id(args[0]) in self._fixed:
            return found
        number = self._inputs.get(id(args[0]), -1)
        sizes = [self._size(size, (number, dim)) for dim, size in enumerate(args[0].shape)]
        if isinstance(found, torch.Size):
            return torch.Size(sizes)
        if func is Tensor.size:
            return sizes[args[1] if len(args) > 1 else (kwargs or {})["dim"]]
        return math.prod(sizes) if sizes else found

    def _size(self, value: int, place: tuple[int, int]) -> Any:
        if place[0] >= 0:
            values = np.stack([SCANNED if place in each.places else _constant(value) for each in self._noted.axes])
            return _noting(value, values, self._noted)
        if value not in self._known:
            of_input = value in {axis.size for axis in self._noted.axes}
            self._known[value] = np.stack([_guessed(value, axis, of_input) for axis in self._noted.axes])
        return _noting(value, self._known[value], self._noted)


def _constant(value: float) -> Values:
    return np.full(len(SCANNED), float(value))


def _guessed(value: int, axis: Axis, of_input: bool) -> Values:
    if value == axis.size:
        return SCANNED
    return _constant(value) if of_input or value == 1 else value * SCANNED // axis.size


class _Noting:
    """Number computed from sizes, which notes the outcomes of comparisons.

    Attributes:
        plain: the number.
        values: its values at other sizes.
        noted: the comparisons so far.
    """

    plain: Any
    values: Values
    noted: _Noted

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __hash__(self) -> int:
        return hash(self.plain)


class _Size(_Noting, int):
    pass


class _Ratio(_Noting, float):
    pass


KINDS: dict[type, Any] = {int: _Size, float: _Ratio}


def _noting(value: Any, values: Values, noted: _Noted) -> Any:
    """Return a number that notes comparisons."""
    number = KINDS[type(value)](value)
    number.plain, number.values, number.noted = value, values, noted
    return number


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, _Noting) else value


def _values(value: Any) -> Any:
    return value.values if isinstance(value, _Noting) else value


def _computing(operation: Callable[..., Any], on_values: Callable[..., Any], step: int = 1) -> Callable[..., Any]:
    """Return a method of a number that computes another; `step` is -1 if it is the right operand."""

    def compute(self: _Noting, *others: Any) -> Any:
        operands = (self, *others)[::step]
        found = operation(*map(_plain, operands))
        if type(found) not in KINDS or len(operands) > 2 or not all(isinstance(each, int | float) for each in operands):
            return found
        with np.errstate(all="ignore"):
            return _noting(found, on_values(*map(_values, operands)), self.noted)

    return compute


def _comparing(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a number that compares it, and notes that."""

    def compare(self: _Noting, other: Any = 0) -> Any:
        found, frame, noted = operation(self.plain, _plain(other)), sys._getframe(1), self.noted.outcomes
        place = frame.f_code, frame.f_lasti, None if isinstance(other, _Noting) else other
        key = place, (self.plain, _plain(other))
        if isinstance(other, int | float) and len(noted) < MOST_NOTED and key not in noted:
            noted[key] = found, operation(self.values, _values(other))
        return found

    return compare


OF_ONE: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "neg": (operator.neg, operator.neg),
    "abs": (abs, abs),
    "round": (round, np.round),
    "floor": (math.floor, np.floor),
    "ceil": (math.ceil, np.ceil),
}
OF_TWO: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    **{name: (getattr(operator, name),) * 2 for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")},
    "pow": (pow, operator.pow),
    "lshift": (operator.lshift, lambda number, bits: number * 2.0**bits),
    "rshift": (operator.rshift, lambda number, bits: number // 2.0**bits),
}
"""Name of an operator -> function of numbers, and of their values."""
for _name, _functions in {**OF_ONE, **OF_TWO}.items():
    setattr(_Noting, f"__{_name}__", _computing(*_functions))
for _name, _functions in OF_TWO.items():
    setattr(_Noting, f"__r{_name}__", _computing(*_functions, step=-1))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Noting, f"__{_name}__", _comparing(getattr(operator, _name)))
_Noting.__bool__ = _comparing(operator.ne)  # type: ignore[attr-defined]
