"""Weights in a file of a sparse network: what is not zero and where it is, in the form that takes the fewest bytes.

`NAME.values` has the nonzero entries (float32 or int8), or rows of four for the blocks of four consecutive inputs of an
output that are not all zero; their order is (output, position in its row), with the block's place for its inputs. Their
positions are either `NAME.kept`, a bit for each entry or block (uint8, the first in the highest bit), or `NAME.columns`
(positions in the row; uint16 if they fit, else int32) with `NAME.starts` (int32, the place of each row's first value,
and their number). `NAME.scales` (float32, one for each output) multiply values of int8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pruning.kernels.byte_tensors import of_blocks, split_in_blocks
from pruning.kernels.sparse_weight import SparseWeight, in_fours


def parts_of(weight: Tensor) -> dict[str, Tensor]:
    """Return the parts of a dense weight, (outputs, inputs, *kernel), by name: the form with the fewest bytes."""
    forms = [form for cells in (weight.unsqueeze(-1), split_in_blocks(weight)) for form in _forms(cells)]
    return min(forms, key=bytes_in)


def bytes_in(parts: dict[str, Tensor]) -> int:
    """Return the bytes of a weight's parts."""
    return sum(part.nbytes for part in parts.values())


def _forms(cells: Tensor) -> Iterator[dict[str, Tensor]]:
    """Yield the parts of a weight in cells of entries, the last dimension: with columns and starts, and with bits."""
    flat = cells.flatten(1, -2)
    used = (flat != 0).any(-1)
    values = flat[used] if flat.shape[-1] > 1 else flat[used].squeeze(-1)
    starts = torch.zeros(len(used) + 1, dtype=torch.int32)
    starts[1:] = used.sum(1).cumsum(0)
    columns = used.nonzero()[:, 1].to(torch.uint16 if used.shape[1] <= 2**16 else torch.int32)
    yield {"values": values, "columns": columns, "starts": starts}
    yield {"values": values, "kept": torch.from_numpy(np.packbits(used.numpy()))}


def taken(name: str, shape: tuple[int, ...], held: dict[str, Tensor], most: int) -> SparseWeight:
    """Take a weight out of a file's tensors, and check it.

    Args:
        name: the weight's name.
        shape: its dense shape.
        held: the file's tensors, from which its parts are removed.
        most: bytes that it may take as a dense weight.

    Raises:
        ValueError: a part is missing, or no weight can have it.
    """
    parts = {part: held.pop(f"{name}.{part}", None) for part in ("values", "columns", "starts", "kept", "scales")}
    values, scales = parts["values"], parts["scales"]
    if values is None or name in held:
        raise ValueError("it must have values, with columns and starts or with kept.")
    blocks = values.ndim == 2 and values.shape[1] == 4
    if values.dtype not in (torch.float32, torch.int8) or not (blocks or values.ndim == 1):
        raise ValueError("its values must be float32 or int8, one row of entries or rows of four.")
    units = (shape[0], in_fours(shape[1]), *shape[2:]) if blocks and len(shape) > 1 else shape
    if 4 * math.prod(shape) > most:
        raise ValueError(f"the weights would take more than the {most} bytes left for dense ones.")
    places = SparseWeight(units, *_positions(units, parts), torch.ones(len(values)))
    places.check()
    weight = _entries(places, values.float(), shape) if blocks else replace(places, values=values.float())
    if values.dtype is torch.int8:
        if (
            scales is None
            or scales.dtype is not torch.float32
            or scales.shape != shape[:1]
            or not scales.isfinite().all()
        ):
            raise ValueError(f"its scales must have {shape[0]} finite float32 entries.")
        weight = replace(weight, values=weight.values * scales[weight.rows()])
    return weight


def _positions(units: tuple[int, ...], parts: dict[str, Tensor | None]) -> tuple[Tensor, Tensor]:
    """Return starts and columns, of int32, from the parts of a weight with so many entries or blocks."""
    starts, columns, kept = parts["starts"], parts["columns"], parts["kept"]
    if kept is not None:
        count = math.prod(units)
        if kept.dtype is not torch.uint8 or kept.shape != (-(-count // 8),) or columns is not None:
            raise ValueError(f"its kept must have a bit for each of {count} entries or blocks.")
        used = torch.from_numpy(np.unpackbits(kept.numpy(), count=count)).view(units[0], -1)
        return SparseWeight.of(used.float()).starts, used.nonzero()[:, 1].int()
    if starts is None or columns is None or columns.dtype not in (torch.uint16, torch.int32):
        raise ValueError("its columns must be uint16 or int32, with starts.")
    return starts, columns.int()


def _entries(places: SparseWeight, values: Tensor, shape: tuple[int, ...]) -> SparseWeight:
    """Return the nonzero entries of blocks."""
    cells = torch.zeros(*places.shape, 4)
    cells.view(places.shape[0], -1, 4)[places.rows(), places.columns.long()] = values
    return SparseWeight.of(of_blocks(cells)[:, : shape[1]])
