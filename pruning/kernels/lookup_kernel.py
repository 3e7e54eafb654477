"""Kernel `lookup`: 16 outputs of one example at a time; inputs are looked up in registers.

A step of a panel of 16 outputs takes one weight of each, among those that read a chunk of 32 inputs. All chunks of a
panel take the same number of steps, so that the processor predicts its branches; the number is chosen so that steps
and left-over weights together cost least. Outputs are sorted by their number of weights, so that those of a panel have
equally many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pruning.kernels.library import library, linear_call
from pruning.kernels.sparse_weight import Kernel, LayerShape, Run, Setting, SparseWeight

PANEL, CHUNK = 16, 32
MOST_EXAMPLES = 12
"""Above this batch size, `columns` is faster."""
STEP, LEFT_OVER = 2.0, 1.5
"""Measured cycles of a step, and of a left-over weight."""


def _settings(_weight: SparseWeight, _layer: LayerShape, examples: int) -> Iterator[Setting]:
    if examples <= MOST_EXAMPLES and library().has_lookup():
        yield {}


def _pack(weight: SparseWeight, layer: LayerShape, _setting: Setting) -> list[Tensor]:
    """Return first steps of panels, places and values of steps, order of outputs, and the left-over weights by row."""
    panels, chunks = -(-layer.outputs // PANEL), -(-layer.inputs // CHUNK)
    order = weight.starts.diff().argsort(descending=True, stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order))
    rows, columns = rank[weight.rows()], weight.columns.long()  # rows in the sorted order
    by_row = rows.argsort(stable=True)
    rows, columns, values = rows[by_row], columns[by_row], weight.values[by_row]
    cell = rows * chunks + columns // CHUNK  # ascends
    counts = torch.bincount(cell, minlength=panels * PANEL * chunks)
    position = torch.arange(len(cell)) - (counts.cumsum(0) - counts)[cell]  # of a weight in its row's chunk
    steps = _steps(counts.view(panels, PANEL, chunks))
    first = torch.zeros(panels + 1, dtype=torch.int64)
    first[1:] = (steps * chunks).cumsum(0)
    fits = position < steps[rows // PANEL]
    row, column, panel = rows[fits], columns[fits], rows[fits] // PANEL
    slot = (first[panel] + column // CHUNK * steps[panel] + position[fits]) * PANEL + row % PANEL
    places = torch.zeros(int(first[-1]) * PANEL, dtype=torch.uint8)
    kept = torch.zeros(len(places), dtype=values.dtype)
    places[slot] = (column % CHUNK | 0x80).to(torch.uint8)
    kept[slot] = values[fits]
    starts = torch.zeros(layer.outputs + 1, dtype=torch.int32)
    starts[1:] = torch.bincount(rows[~fits], minlength=layer.outputs).cumsum(0)
    return [first.int(), places, kept, order.int(), starts, columns[~fits].int(), values[~fits]]


def _steps(counts: Tensor) -> Tensor:
    """Return each panel's number of steps in a chunk: the cheapest, from weights of shape (panels, PANEL, chunks)."""
    most = int(counts.max()) if counts.numel() else 0
    costs = [
        STEP * steps * counts.shape[2] + LEFT_OVER * (counts - steps).clamp_min(0).sum((1, 2))
        for steps in range(most + 1)
    ]
    return torch.stack([cost.expand(len(counts)) for cost in costs]).argmin(0)


def check() -> None:
    """Raise RuntimeError if the processor lacks the instructions."""
    if not library().has_lookup():
        raise RuntimeError("the kernel `lookup` needs a processor with AVX-512.")


def _bind(layer: LayerShape, _setting: Setting, arrays: Sequence[Tensor], bias: Tensor, shape: torch.Size) -> Run:
    check()
    return linear_call("lookup", (), arrays, bias, layer, shape)


KERNEL = Kernel(_settings, _pack, _bind)
