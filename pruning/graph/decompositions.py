"""Composite operations of torch that a trace replaces by others, each of which has a label rule."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.export.exported_program import default_decompositions


def decompositions() -> dict[Any, Any]:
    """Return composite operation -> function of the operations that it stands for, each of which has a label rule."""
    known = default_decompositions()
    aten = torch.ops.aten
    table = {each.default: known[each.default] for each in (aten.einsum, aten.stack, aten.glu, aten.baddbmm)}
    assigned = {aten.slice_scatter.default: _written, aten.select_scatter.default: _written_at}
    return {**table, **assigned, aten.tensor_split.sections: _equal_parts}


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
    if step != 1 or first < 0 or last < 0:
        return NotImplemented
    before = [whole.narrow(dim, 0, first)] if first else []
    after = [whole.narrow(dim, last, left)] if last < sys.maxsize and (left := whole.shape[dim] - last) > 0 else []
    return torch.cat([*before, part, *after], dim)
