"""Inputs for which a traced network is right: a trace fixes all sizes but those of batches, and all other values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

UNBOUNDED = 2**62
"""Sizes from here on stand for no bound."""


@dataclass(frozen=True)
class Size:
    """A size that may vary between bounds; equal symbols must have equal sizes."""

    symbol: str
    low: int
    high: int


@dataclass(frozen=True)
class InputGuard:
    """Inputs that a traced network takes, in the order of its graph.

    Args:
        inputs: for a tensor its sizes (numbers where they are fixed), for anything else the value.
        names: names of the keyword arguments, in the order of the trace.
        seen: shapes that a network with a single tensor has taken.
    """

    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    seen: set[torch.Size] = field(default_factory=set, compare=False)

    @classmethod
    def of(cls, graph: fx.Graph, names: Mapping[str, Any]) -> InputGuard:
        """Return the guard of a traced graph whose keyword arguments have these names."""
        return cls(tuple(_of_node(node) for node in graph.find_nodes(op="placeholder")), tuple(names))

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs of a call.

        Raises:
            ValueError: the graph was traced for other sizes or values.
        """
        alone = args[0] if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) else None
        if set(kwargs) != set(self.names):
            return  # the graph refuses them itself
        leaves = tree_leaves((args, {name: kwargs[name] for name in self.names}))
        symbols: dict[str, int] = {}
        for known, leaf in zip(self.inputs, leaves, strict=False):
            if isinstance(leaf, Tensor) and isinstance(known, list):
                _check_sizes(known, leaf, symbols)
            elif type(leaf) is not type(known) or leaf != known:
                raise ValueError(
                    f"an input (={str(leaf)[:80]}) must be {known!r} as in the example, because the network was traced "
                    "for it; trace it again by to_sparse."
                )
        if alone is not None and len(self.seen) < 1000:
            self.seen.add(alone.shape)


def _of_node(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return [_size(each) for each in value.shape] if isinstance(value, Tensor) else value


def _size(size: Any) -> int | Size:
    if isinstance(size, int):
        return size
    expression, env = size.node.expr, size.node.shape_env
    bounds = env.bound_sympy(expression)
    low, high = (int(each) if each.is_Integer else UNBOUNDED for each in (bounds.lower, bounds.upper))
    if low == high:
        return low
    return Size(str(expression), low if low > 2 else 0, high)  # a trace takes 0 and 1 for constants


def _check_sizes(known: list[int | Size], leaf: Tensor, symbols: dict[str, int]) -> None:
    shape = [*leaf.shape]
    fits = len(shape) == len(known)
    for size, given in zip(known, shape, strict=False):
        if isinstance(size, int):
            fits = fits and size == given
        else:
            fits = fits and size.low <= given <= size.high and symbols.setdefault(size.symbol, given) == given
    if not fits:
        said = ", ".join(str(size) if isinstance(size, int) else _bounds(size) for size in known)
        raise ValueError(
            f"an input of shape {tuple(shape)} must have the shape ({said}), because the network was traced for it; "
            "pass such an input, or trace the network again by to_sparse with an example of the other shape."
        )


def _bounds(size: Size) -> str:
    if size.high >= UNBOUNDED:
        return "batch" if size.low <= 2 else f"{size.low} or more"
    return f"{size.low} to {size.high}"
