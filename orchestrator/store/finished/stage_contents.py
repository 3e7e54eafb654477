"""How the files of finished stages are parsed: tensors, masks and values, in memory bounded by what the store holds.

A digest that fits proves nothing of a file, for whoever wrote the file wrote the record, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.core.errors import StoreError
from orchestrator.core.plain_data import parse_json
from orchestrator.core.records import StageRecord

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Masks = Mapping[str, NDArray[np.bool_]]

MOST_HEADER = 2**25
"""Largest header of a safetensors file in bytes: some 200,000 tensors."""
MOST_ENTRIES = 2**27
"""Largest number of mask entries that are read where the stage keeps no weights of as many bytes."""


def tensors_in(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, mapped from the file.

    Raises:
        ValueError: the file is damaged or of another format
    """
    from safetensors.torch import load_file

    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
    try:
        if header > MOST_HEADER:
            raise ValueError(f"its header has {header} bytes, more than {MOST_HEADER}")
        return load_file(path)
    except Exception as error:  # of safetensors' own kind, and of torch's for dtypes and shapes that it lacks
        raise ValueError(f"no tensors can be read: {_short(error)}") from error


def masks_in(content: bytes, record: StageRecord, most: int = MOST_ENTRIES) -> Masks:
    """Return the masks of a stage from their file, once their shapes are those of the record.

    Args:
        content: the file, in whose few bytes any number of equal entries can stand
        record: of the stage
        most: entries that memory may be taken for

    Raises:
        ValueError: the file is damaged, or holds other tensors than the record says
        StoreError: the record says more entries than `most`
    """
    from pruning.masks import mask_files  # needs no torch, two seconds for the driver

    sizes = record.tensor_sizes
    if (entries := sum(sizes.values())) > most:
        raise StoreError(
            f"the masks of stage {record.key[:12]} have {entries} entries by their record, and at most {most} are read "
            "without weights as large beside them; run the sweep with store.keep=all, and a `store.uri` of its own"
        )

    def check(name: str, shape: Sequence[int]) -> None:
        if math.prod(shape) != sizes.get(name):
            raise ValueError(f"the mask of `{name}` has not the {sizes.get(name)} entries that the record says")

    try:
        return mask_files.decode(mask_files.read_npz(content), check)[0]
    except ValueError as error:
        raise ValueError(f"no masks can be read: {_short(error)}") from error


def values_in(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a file; raise ValueError where there is none."""
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


def _short(error: Exception) -> str:
    """Return the first words of an error, which may quote names of any length."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
