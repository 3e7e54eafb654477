"""Composite operations of torch that a trace replaces by others, each of which has a label rule."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.export.exported_program import default_decompositions


def decompositions() -> dict[Any, Any]:
    """Return composite operation -> function of the operations that it stands for, each of which has a label rule."""
    known = default_decompositions()
    aten = torch.ops.aten
    table = {each.default: known[each.default] for each in (aten.stack, aten.glu, aten.baddbmm)}
    assigned = {aten.slice_scatter.default: _written, aten.select_scatter.default: _written_at}
    einsum = partial(_einsum, known[aten.einsum.default])
    return {**table, **assigned, aten.tensor_split.sections: _equal_parts, aten.einsum.default: einsum}


def _equal_parts(whole: Tensor, parts: int, dim: int = 0) -> Any:
    """Decompose a split into parts of equal size."""
    return NotImplemented if whole.shape[dim] % parts else torch.split(whole, whole.shape[dim] // parts, dim)


def _written_at(whole: Tensor, part: Tensor, dim: int, index: int) -> Any:
    """Decompose an assignment to one index."""
    place = index if index >= 0 else index + whole.shape[dim]
    return _written(whole, part.unsqueeze(dim), dim, place, place + 1)


def _written(whole: Tensor, part: Tensor, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> Any:
    """Decompose an assignment to a slice: the part, and what lies before and after it."""
    first, last = start or 0, sys.maxsize if end is None else end
    if not isinstance(size := whole.shape[dim], int):  # a comparison with it would only hold for the example
        return NotImplemented
    first, last = min(first, size), min(last, size)
    if step != 1 or first < 0 or last < first:
        return NotImplemented
    before = [whole.narrow(dim, 0, first)] if first else []
    after = [whole.narrow(dim, last, size - last)] if last < size else []
    return torch.cat([*before, part, *after], dim)


def _einsum(
    of_torch: Callable[..., Any], equation: str, operands: Sequence[Tensor], *, path: Sequence[int] | None = None
) -> Any:
    """Decompose an einsum of two tensors so that a stack of matrices stays one, as `td,edh->teh` has for experts.

    torch's own decomposition merges the stack with the outputs of its matrices, so that neither can be followed.
    """
    terms, arrow, result = equation.replace(" ", "").partition("->")
    one, other = [*terms.split(","), "", ""][:2]
    both, whole = set(one) & set(other), set(one) | set(other)
    summed = [each for each in one if each in both and each not in result]
    rows, columns = ([each for each in result if each in own and each not in both] for own in (one, other))
    plain = arrow and len(operands) == 2 and "." not in terms and whole == {*summed, *result}
    if plain and len(one + other) == len(whole) + len(both):
        if not summed:
            return math.prod(_arranged(x, own, result) for x, own in zip(operands, (one, other), strict=True))
        lengths = [x.shape[own.index(summed[0])] for x, own in zip(operands, (one, other), strict=True)]
        if len(summed) == 1 and len(columns) > 1 and lengths[0] == lengths[1]:  # else einsum repeats one
            stack = [*(each for each in result if each in both), *columns[:-1]]
            found = _product(operands, (one, other), (stack, rows, summed, columns[-1:]))
            return _arranged(found, "".join([*stack, *rows, *columns[-1:]]), result)
    return of_torch(equation, operands, path=path)


def _product(operands: Sequence[Tensor], terms: tuple[str, str], dims: tuple[list[str], ...]) -> Tensor:
    """Multiply the matrices of two tensors, with the dimensions (stack ..., rows ..., column)."""
    stack, rows, summed, column = dims
    first = _arranged(operands[0], terms[0], [*stack, *rows, *summed])
    sizes, place = first.shape[len(stack) : -1], len(stack)
    first = first.flatten(place, -2) if rows else first.unsqueeze(-2)
    found = first @ _arranged(operands[1], terms[1], [*stack, *summed, *column])
    return found.reshape([*found.shape[:place], *sizes, found.shape[-1]])


def _arranged(x: Tensor, dims: str, wanted: Iterable[str]) -> Tensor:
    """Order the dimensions of a tensor, and add those of size 1 that it lacks."""
    wanted = list(wanted)
    x = x.permute([dims.index(each) for each in wanted if each in dims])
    for place, each in enumerate(wanted):
        x = x if each in dims else x.unsqueeze(place)
    return x
