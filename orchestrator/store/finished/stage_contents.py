"""Parsers for the files of finished stages: tensors, masks and values, in memory bounded by the store's own size.

The digest in a record does not make a file trustworthy: whoever wrote the file could write the record, too.
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
"""Largest accepted header of a safetensors file in bytes: some 200,000 tensors."""
MOST_ENTRIES = 2**27
"""Largest accepted number of mask entries, unless the stage's weights have more bytes than that."""


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
    except Exception as error:  # safetensors raises its own errors, and torch others for unknown dtypes and shapes
        raise ValueError(f"no tensors can be read: {_short(error)}") from error


def masks_in(content: bytes, record: StageRecord, most: int = MOST_ENTRIES) -> Masks:
    """Return the masks of a stage from the content of their file, after checking their sizes against the record.

    Args:
        content: the file; it is compressed, so a few bytes can hold any number of equal entries
        record: the stage's record
        most: largest number of entries to allocate memory for

    Raises:
        ValueError: the file is damaged, or its tensors differ from the record's
        StoreError: the record has more entries than `most`
    """
    from pruning.masks import mask_files  # without torch, whose import costs the driver two seconds

    sizes = record.tensor_sizes
    if (entries := sum(sizes.values())) > most:
        raise StoreError(
            f"the masks of stage {record.key[:12]} have {entries} entries by their record, and at most {most} are read "
            "unless the stage keeps its weights; run the sweep with store.keep=all and a new `store.uri`"
        )

    def check(name: str, shape: Sequence[int]) -> None:
        if math.prod(shape) != sizes.get(name):
            raise ValueError(
                f"the mask of `{name}` has {math.prod(shape)} entries, and the record says {sizes.get(name)}"
            )

    try:
        return mask_files.decode(mask_files.read_npz(content), check)[0]
    except ValueError as error:
        raise ValueError(f"no masks can be read: {_short(error)}") from error


def values_in(content: bytes) -> dict[str, Any]:
    """Return the JSON object in a file; raise ValueError if the file holds anything else."""
    found = parse_json(content)
    if not isinstance(found, dict):
        raise ValueError(f"expected a JSON object, found {type(found).__name__}")
    return found


def _short(error: Exception) -> str:
    """Return the first 200 characters of an error message, which may quote names of any length."""
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
