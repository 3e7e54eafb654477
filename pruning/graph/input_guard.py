"""Inputs for which a trace holds: their number, dtypes, sizes and values, and the branches that the example took.

torch.export follows one path through a forward, and notes the conditions on sizes that chose the path, such as
`x.shape[0] > 4`. A guard checks them at each call.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental import _config
from torch.utils._pytree import tree_leaves

ANY_SIZE = "backed_size_oblivious"
"""Setting of torch by which a trace treats sizes of 0 and 1 like others; torch has it since 2.7."""
TORCH_INTERNALS = f"{Path(torch.__file__).parent}/_"
NAMES = {"math": math, "torch": torch}
"""Names that conditions of torch use."""
MOST_SEEN = 1000
REASON = (
    " as in the example of its trace: the network repeats the operations of that call; make it again from the masked "
    "network, with an example like this input."
)


@dataclass(frozen=True)
class TensorInput:
    """A tensor that a trace takes.

    Args:
        dtypes: names of its dtypes: the example's, and those to which the network was converted.
        sizes: the size of each dimension; None where it may vary.
        contiguous: whether it is contiguous; None: the network does not ask.
    """

    dtypes: tuple[str, ...]
    sizes: tuple[int | None, ...]
    contiguous: bool | None = None

    def refusal(self, leaf: Any) -> str:
        """Return what an input must be; empty if it fits."""
        if not isinstance(leaf, Tensor):
            return "a tensor"
        fits = all(size is None or size == given for size, given in zip(self.sizes, leaf.shape, strict=False))
        if leaf.ndim != len(self.sizes) or not fits:
            return f"of shape ({', '.join('any' if size is None else str(size) for size in self.sizes)})"
        if _name(leaf.dtype) not in self.dtypes:
            return " or ".join(self.dtypes)
        if self.contiguous is not None and self.contiguous != leaf.is_contiguous():
            return "contiguous" if self.contiguous else "not contiguous"
        return ""

    def converted(self, convert: Callable[[Tensor], Tensor]) -> TensorInput:
        """Return the input of a network whose tensors are converted; its inputs may be converted alike."""
        before = [torch.empty(0, dtype=getattr(torch, each)) for each in self.dtypes]
        after = [_name(convert(each).dtype) for each in before if each.is_floating_point() or each.is_complex()]
        return replace(self, dtypes=tuple(dict.fromkeys([*self.dtypes, *after])))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class InputGuard:
    """Inputs that a traced network takes, in the order of its graph.

    Args:
        inputs: (name, what it must be) for each input: a `TensorInput`, or the value that anything else must equal.
        positional: number of positional arguments of the example.
        keywords: names of its keyword arguments, in the order of the trace.
        rules: conditions on the inputs as Python code, such as `x.shape[0] % 2 == 0`; all must hold.
        order: names of the parameters that the network's forward takes by position.
        seen: (shape, dtype) of inputs of a single tensor that were checked.
    """

    inputs: tuple[tuple[str, Any], ...]
    positional: int
    keywords: tuple[str, ...]
    rules: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    seen: set[tuple[torch.Size, torch.dtype]] = field(default_factory=set, init=False, compare=False, repr=False)
    _conditions: tuple[Callable[..., bool], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        names = ", ".join(name for name, _ in self.inputs)
        compiled = tuple(eval(f"lambda {names}: {rule}", NAMES) for rule in self.rules)
        object.__setattr__(self, "_conditions", compiled)

    def __reduce__(self) -> tuple[Any, ...]:
        return InputGuard, (self.inputs, self.positional, self.keywords, self.rules, self.order)

    @classmethod
    def of(
        cls, graph: fx.Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any], order: tuple[str, ...], *, strided: bool
    ) -> InputGuard:
        """Return the guard of a program's graph.

        Args:
            graph: the program's graph.
            args, kwargs: inputs of the trace.
            order: see the class.
            strided: whether the network asks if tensors are contiguous.
        """
        leaves, nodes = tree_leaves((args, dict(kwargs))), graph.find_nodes(op="placeholder")
        inputs: list[tuple[str, Any]] = []
        symbols: dict[Any, tuple[str, int]] = {}
        guards: list[Any] = []
        for node, leaf in zip(nodes[len(nodes) - len(leaves) :], leaves, strict=True):  # parameters come first
            known = leaf
            if isinstance(leaf, Tensor):
                sizes: list[int | None] = []
                for dim, (size, number) in enumerate(zip(node.meta["val"].shape, leaf.shape, strict=True)):
                    sizes.append(number if isinstance(size, int) else None)
                    if not isinstance(size, int):
                        symbols[size.node._expr] = f"{node.target}.shape[{dim}]", number
                        guards = size.node.shape_env.guards
                known = TensorInput((_name(leaf.dtype),), tuple(sizes), leaf.is_contiguous() if strided else None)
            inputs.append((str(node.target), known))
        return cls(tuple(inputs), len(args), tuple(kwargs), tuple(dict.fromkeys(_rules(guards, symbols))), order)

    def within(self, earlier: InputGuard) -> InputGuard:
        """Return the guard of a graph that is traced again: torch.export does not call its checks."""
        names = {old: new for (old, _), (new, _) in zip(earlier.inputs, self.inputs, strict=True)}
        rules = (
            re.sub(r"(?<![.\w])[A-Za-z_]\w*", lambda match: names.get(match[0], match[0]), each)
            for each in earlier.rules
        )
        inputs = []
        for (name, known), (_, before) in zip(self.inputs, earlier.inputs, strict=True):
            if isinstance(known, TensorInput) and isinstance(before, TensorInput):
                sizes = (new if old is None else old for old, new in zip(before.sizes, known.sizes, strict=True))
                known = replace(known, sizes=tuple(sizes))
            inputs.append((name, known))
        return replace(self, inputs=tuple(inputs), rules=tuple(dict.fromkeys([*rules, *self.rules])))

    def fixed(self, places: Collection[tuple[str, int]], leaves: Sequence[Any]) -> InputGuard:
        """Return the guard of a graph that holds numbers in place of some sizes, given as (input, dimension)."""
        inputs = []
        for (name, known), leaf in zip(self.inputs, leaves, strict=True):
            if isinstance(known, TensorInput):
                sizes = (leaf.shape[dim] if (name, dim) in places else size for dim, size in enumerate(known.sizes))
                known = replace(known, sizes=tuple(sizes))
            inputs.append((name, known))
        return replace(self, inputs=tuple(inputs))

    def check(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Check the inputs of a call.

        Raises:
            ValueError: the network was not traced for inputs like these.
        """
        if refusal := self.refusal(args, kwargs):
            raise ValueError(f"{refusal}{REASON}")
        known = self.inputs[0][1] if len(self.inputs) == len(args) == 1 and isinstance(args[0], Tensor) else None
        if isinstance(known, TensorInput) and known.contiguous is None and len(self.seen) < MOST_SEEN:
            self.seen.add((args[0].shape, args[0].dtype))

    def refusal(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """Return what is wrong with the inputs of a call; empty if they fit."""
        leaves = self._leaves(args, kwargs)
        if len(leaves) != len(self.inputs):
            call = ", ".join([*["..."] * len(args), *(f"{name}=..." for name in kwargs)])
            return f"the call ({call}) must have the inputs {', '.join(name for name, _ in self.inputs)}"
        for (name, known), leaf in zip(self.inputs, leaves, strict=True):
            given = f"of shape {tuple(leaf.shape)}, {leaf.dtype}" if isinstance(leaf, Tensor) else f"={str(leaf)[:80]}"
            if not isinstance(known, TensorInput):
                if type(leaf) is not type(known) or leaf != known:
                    return f"`{name}` ({given}) must be {known!r}"
            elif refusal := known.refusal(leaf):
                return f"`{name}` ({given}) must be {refusal}"
        for rule, condition in zip(self.rules, self._conditions, strict=True):
            if not _holds(condition, leaves):
                shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves if isinstance(leaf, Tensor))
                return f"inputs of shapes {shapes} must fulfil {rule}"
        return ""

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the inputs in the order of the trace; inputs that are no containers may be passed by name."""
        names = [name for name, _ in self.inputs]
        if set(kwargs) == set(self.keywords) and len(args) == self.positional:
            return tree_leaves((args, {name: kwargs[name] for name in self.keywords}))
        placed = names[self.positional : len(args)] == [*self.order[self.positional : len(args)]]
        if placed and set(kwargs) == set(names[len(args) :]) and len(names) == self.positional + len(self.keywords):
            return [*args, *(kwargs[name] for name in names[len(args) :])]
        return []

    def hook(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs of a call; a forward pre-hook with keyword arguments."""
        self.check(args, kwargs)

    def converted(self, convert: Callable[[Tensor], Tensor]) -> InputGuard:
        """Return the guard of the network after a conversion of its tensors."""
        inputs = tuple(
            (name, known.converted(convert) if isinstance(known, TensorInput) else known) for name, known in self.inputs
        )
        return replace(self, inputs=inputs)


def _holds(condition: Callable[..., bool], leaves: list[Any]) -> bool:
    try:
        return bool(condition(*leaves))
    except ZeroDivisionError:
        return False


def _rules(guards: list[Any], symbols: Mapping[Any, tuple[str, int]]) -> Iterator[str]:
    """Yield the conditions that torch.export found; sizes in one that cannot be written must be the example's.

    Operations of torch exclude sizes of 1 that only change how a tensor lies in memory; these conditions are left out.
    """
    from torch.utils._sympy.printers import PythonPrinter

    if not hasattr(_config, ANY_SIZE):  # then a trace takes sizes of 0 and 1 for constants
        yield from (f"{name} >= 2" for name, _ in symbols.values())
    named = {symbol: type(symbol)(name, integer=True) for symbol, (name, _) in symbols.items()}
    for guard in guards:
        file, free = str(getattr(guard.sloc.framework_loc, "filename", "")), guard.expr.free_symbols
        if file.startswith(TORCH_INTERNALS) and type(guard.expr).__name__ != "Equality":
            continue
        try:
            if unknown := free - set(symbols):
                raise NotImplementedError(unknown)
            yield PythonPrinter().doprint(guard.expr.xreplace(named))
        except NotImplementedError:
            which = free if free <= set(symbols) else set(symbols)
            yield from (f"{name} == {number}" for name, number in map(symbols.__getitem__, which))
