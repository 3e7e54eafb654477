"""Weights in files and as digests, tensor by tensor, so that memory never holds a second copy of all weights."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
import tempfile
import uuid
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import torch
from safetensors.torch import save
from torch import Tensor, nn

from orchestrator.config.sources import file_digest
from orchestrator.core.errors import OrchestratorError
from orchestrator.core.plain_data import quoted
from orchestrator.core.redact import redact
from orchestrator.store.finished.stage_contents import tensors_in
from orchestrator.store.node_folder import node_folder, tidy
from pruning import is_pruned

PIECE = 4 * 2**20
"""Bytes of a tensor that are copied to the CPU at a time."""
WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DataParallel and torch.compile put before the names of parameters."""
STATES = ("state_dict", "model_state_dict", "model")
"""Keys under which a larger checkpoint stores the weights."""
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
    """Load the result of `plain_state` into a plain model of the same structure.

    Raises:
        ValueError: the tensors belong to another network; the text lists the first misfits
    """
    tensors = dict(found)
    extra = _extra(tensors)
    try:
        model.load_state_dict({**tensors, **extra})
    except RuntimeError as error:
        own = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        misfits = [*_misfits(own, set(own), tensors, model)][:LISTED] or [" ".join(str(error).split())]
        raise ValueError("; ".join(each[:200] for each in misfits)) from error


def _extra(found: dict[str, Tensor]) -> dict[str, Any]:
    """Remove the extra state, which is JSON, from `found` and return it by name; raise ValueError for invalid JSON."""
    names = [name for name in found if name.endswith(f"_extra_state{AS_JSON}")]
    try:
        return {name.removesuffix(AS_JSON): json.loads(found.pop(name).numpy().tobytes()) for name in names}
    except (RecursionError, TypeError) as error:  # TypeError: NumPy lacks the dtype
        raise ValueError(f"an extra state cannot be read: {error}") from error


def initialise(model: nn.Module, place: str, expected: str, keep: Sequence[str] = ()) -> None:
    """Copy a checkpoint into a plain model, by name and in the model's dtypes; refuse tensors that do not fit.

    Names may have, or lack, the prefix that DataParallel, torch.compile or a transformers model with a head puts before
    them. One name is enough for tied parameters.

    Args:
        model: the network.
        place: path or URI of a .safetensors file, or of a file from torch.save: tensors by name, or a checkpoint that
            holds them, for example as `state_dict`. Code in the file is never run.
        expected: SHA-256 of the file's bytes
        keep: patterns on the names of tensors that keep their initialisation

    Raises:
        CheckpointError: the file is absent, damaged, not a checkpoint, or different from the planned one, or it belongs
            to another network
    """
    said = f"`model.weights` (={redact(place)})"
    with _local_file(place, expected, said) as path:
        found = _read(path, said)
        extra = {name: value for name, value in _extra(found).items() if name in model.state_dict()}
        own = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        for pattern in keep:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise CheckpointError(f"`model.reinitialise` (={pattern}) matches no parameter of the network.")
        taken = {name for name in own if not any(fnmatchcase(name, pattern) for pattern in keep)}
        named = {_name_in_network(name, own, model): value for name, value in found.items()}
        infinite = [name for name, value in named.items() if name in taken and not bool(value.isfinite().all())]
        if infinite:
            raise CheckpointError(
                f"{said} contains NaN or infinity in `{infinite[0]}`: its training diverged; pass an earlier one."
            )
        misfits = list(_misfits(own, taken, named, model))
        if misfits:
            more = f", and {len(misfits) - LISTED} more" if len(misfits) > LISTED else ""
            raise CheckpointError(
                f"{said} does not fit this network: {'; '.join(misfits[:LISTED])}{more}; choose the model that it was "
                "saved from, or name the tensors that keep their initialisation, as in model.reinitialise=['fc.*']."
            )
        with torch.no_grad():
            for name in taken & set(named):
                own[name].copy_(named[name])
        model.load_state_dict(extra, strict=False)


@contextmanager
def _local_file(place: str, expected: str, said: str) -> Iterator[Path]:
    """Yield the path of a file on this node whose bytes are as expected.

    A downloaded file is cached in the node's folder, if there is one.
    """
    folder = node_folder()
    with tempfile.TemporaryDirectory() as own:
        try:
            if "://" in place:
                path = Path(folder or own, f"{expected}{Path(place).suffix}.checkpoint")
                if not path.is_file():
                    aside = path.with_name(f".{uuid.uuid4().hex}")
                    with fsspec.open(place, "rb") as source, open(aside, "wb") as file:
                        shutil.copyfileobj(source, file, PIECE)
                    aside.replace(path)
                    tidy(path.parent, path.suffix)
            else:
                path = Path(place)
            digest = file_digest(str(path))
        except Exception as error:  # libraries of file systems raise many types
            reason = redact(" ".join(str(error).split()) or type(error).__name__)
            raise CheckpointError(
                f"{said} cannot be read on this node: {reason}; put the file where every node can read it."
            ) from error
        if digest != expected:
            path.unlink() if "://" in place else None
            raise CheckpointError(
                f"{said} must be the file that the sweep was planned with, but it has changed, or this node has "
                "another; run the same command again."
            )
        yield path


def _read(path: Path, said: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, mapped from the file if its format allows."""
    try:
        if ".safetensors" in path.suffixes:
            return tensors_in(path)
        with warnings.catch_warnings(action="ignore"):  # torch warns of pickles that torch.save did not write
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        if "Unsupported global" in str(error):
            raise CheckpointError(
                f"{said} contains code, which is never run, or is damaged; save the weights again by "
                "torch.save(model.state_dict(), ...) or as .safetensors."
            ) from error
        reason = (
            "" if isinstance(error, RuntimeError) else f" ({type(error).__name__})"
        )  # torch's text is about archives
        raise CheckpointError(
            f"{said} is damaged, or not a file of weights{reason}; copy it again, or save it by "
            "torch.save(model.state_dict(), ...) or as .safetensors."
        ) from error
    state: Any = found
    for key in STATES:
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    tensors = (
        {name: value for name, value in state.items() if isinstance(value, Tensor)} if hasattr(state, "items") else {}
    )
    if not tensors or not all(isinstance(name, str) for name in tensors):
        raise CheckpointError(
            f"{said} holds {type(state).__name__}, not tensors by name; save the weights by "
            "torch.save(model.state_dict(), ...)."
        )
    return tensors


def _name_in_network(name: str, own: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return the network's name for the checkpoint's `name`; `name` itself if the network has no similar one."""
    head = f"{getattr(model, 'base_model_prefix', '')}."
    forms = [name, *(name.removeprefix(wrapper) for wrapper in WRAPPERS), head + name, name.removeprefix(head)]
    return next((form for form in forms if form in own), name)


def _misfits(
    own: Mapping[str, Tensor], taken: set[str], named: Mapping[str, Tensor], model: nn.Module
) -> Iterator[str]:
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
