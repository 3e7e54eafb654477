"""Weights in files and as digests, tensor by tensor, so that memory never holds a second copy of all weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import torch
from safetensors.torch import save
from torch import Tensor, nn

from orchestrator.core.errors import OrchestratorError
from orchestrator.core.plain_data import quoted
from pruning import is_pruned, route_among_survivors

PIECE = 4 * 2**20
"""Bytes of a tensor that are copied to the CPU at a time."""
AS_JSON = ".json"
"""Suffix for the names of a network's extra state, which is stored as JSON."""
LISTED = 3
"""Number of misfits between a checkpoint and a network that messages list."""


class CheckpointError(OrchestratorError):
    """Initial weights that cannot be read, or that belong to another network."""


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model` as if it had never been pruned: masked weights under their own names.

    Unmasked tensors are those of the model and change with it. Values from `get_extra_state` that are not tensors are
    JSON, as tensors of bytes.

    Raises:
        CheckpointError: JSON cannot hold a value of the extra state
    """
    state = model.state_dict()
    plain: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        for name in [key.removesuffix("_orig") for key in dict(module.named_parameters(recurse=False))]:
            path = f"{prefix}.{name}" if prefix else name
            if f"{path}_mask" in state and f"{path}_orig" in state and is_pruned(module):
                plain[path] = state.pop(f"{path}_orig") * state.pop(f"{path}_mask")
    plain.update(state)
    extra = {name: value for name, value in plain.items() if not isinstance(value, Tensor)}
    plain |= {name + AS_JSON: _json(name, extra[name]) for name in extra}
    return {name: plain[name].detach() for name in sorted(plain) if name not in extra}


def _json(name: str, value: object) -> Tensor:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError):
        text = "null"
    if json.loads(text) != value:
        raise CheckpointError(
            f"`{name}` (={quoted(value)}) must be a tensor or JSON: numbers, text, lists, and dicts with text keys; "
            "change what `get_extra_state` of the network returns."
        )
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def state_digest(state: Mapping[str, Tensor]) -> str:
    """Return the SHA-256 of names, dtypes, shapes and bytes."""
    found = hashlib.sha256()
    for name in sorted(state):
        tensor = state[name]
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        for piece in _pieces(tensor):
            found.update(piece)
    return found.hexdigest()


def write_state(state: Mapping[str, Tensor], file: BinaryIO, metadata: dict[str, str] | None = None) -> None:
    """Write the same file as `safetensors.torch.save` for contiguous copies of the tensors on the CPU.

    safetensors orders the tensors and names their dtypes, in a header that it makes from empty tensors; shapes and
    offsets are filled in here. A header is its length in 8 bytes, then JSON padded with spaces to a multiple of 8.
    """
    empty = save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in state.items()}, metadata)
    header, place = json.loads(empty[8:]), 0
    names = [name for name in header if name in state]
    for name in names:
        entry = header[name]
        end = place + state[name].nbytes
        entry.update(shape=list(state[name].shape), data_offsets=[place, end])
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in names:
        for piece in _pieces(state[name]):
            file.write(piece)


def load_state(model: nn.Module, found: Mapping[str, Tensor]) -> None:
    """Load the result of `plain_state` into a plain model of the same structure; mixtures route among survivors.

    Raises:
        ValueError: the tensors belong to another network; the text lists the first misfits
    """
    tensors = dict(found)
    extra = extra_state(tensors)
    try:
        model.load_state_dict({**tensors, **extra})
    except RuntimeError as error:
        own = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        wrong = [*misfits(own, set(own), tensors, model)][:LISTED] or [" ".join(str(error).split())]
        raise ValueError("; ".join(each[:200] for each in wrong)) from error
    route_among_survivors(model)


def extra_state(found: dict[str, Tensor]) -> dict[str, Any]:
    """Remove the extra state, which is JSON, from `found` and return it by name; raise ValueError for invalid JSON."""
    names = [name for name in found if name.endswith(f"_extra_state{AS_JSON}")]
    try:
        return {name.removesuffix(AS_JSON): json.loads(found.pop(name).numpy().tobytes()) for name in names}
    except (RecursionError, TypeError) as error:  # TypeError: NumPy lacks the dtype
        raise ValueError(f"an extra state cannot be read: {error}") from error


def misfits(own: Mapping[str, Tensor], taken: set[str], named: Mapping[str, Tensor], model: nn.Module) -> Iterator[str]:
    """Yield the differences between a network and tensors in a file: shapes, missing tensors, tensors too many.

    Args:
        own: the network's tensors by name
        taken: names of the tensors to load
        named: the file's tensors, by their names in the network
        model: the network, which tells tied parameters
    """
    places: dict[int, set[str]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        places.setdefault(id(tensor), set()).add(name)
    tied = {name for names in places.values() if names & set(named) for name in names}
    for name, tensor in own.items():
        if name in taken and name in named and named[name].shape != tensor.shape:
            yield f"`{name}` is {list(named[name].shape)} in the file and {list(tensor.shape)} in the network"
    yield from (f"the file lacks `{name}`" for name in own if name in taken and name not in named and name not in tied)
    yield from (f"the network lacks `{name}`" for name in named if name not in own)


def _pieces(tensor: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row-major order, copying at most `PIECE` bytes, or one row, at a time."""
    rows = tensor.detach()
    if rows.is_contiguous():
        rows = rows.flatten()
    count = max(1, PIECE // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), count):
        yield rows[start : start + count].cpu().contiguous().flatten().view(torch.uint8).numpy().data
