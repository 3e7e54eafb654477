"""Weights as a file and as a digest: tensor by tensor, so that no second copy of them is ever in memory."""

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
"""Bytes of a tensor that are brought to the CPU at a time."""
WRAPPERS = ("module.", "_orig_mod.")
"""What DataParallel and torch.compile put before the names of parameters."""
STATES = ("state_dict", "model_state_dict", "model")
"""Where a checkpoint that holds more keeps the weights."""
AS_JSON = ".json"
"""After the names of what a network keeps beside its tensors."""
TOLD = 3
"""Misfits between a checkpoint and a network that are spelled out."""


class CheckpointError(OrchestratorError):
    """Weights to begin with that cannot be read, or are those of another network."""


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state_dict of `model` as if it had never been pruned: masked weights under their own names.

    The tensors are those of the model where nothing masks them, and change with it. What a `get_extra_state` says
    that is no tensor is here as JSON, in bytes.

    Raises:
        CheckpointError: that cannot be said in JSON
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
            f"`{name}` (={quoted(value)}) must be a tensor, or what JSON can hold, numbers, text, lists, and dicts by "
            "text; let `get_extra_state` of the network return that."
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
    """Write the file that `safetensors.torch.save` would make of contiguous copies of the tensors on the CPU.

    The package orders the tensors and names their dtypes, in the header it makes of empty ones; shapes and places are
    filled in here. A header is its length in 8 bytes, then JSON padded with spaces to a multiple of 8.
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
    """Copy what `plain_state` returned of a network into a plain model of the same kind.

    Raises:
        ValueError: the tensors are those of another network; the first misfits are told
    """
    tensors = dict(found)
    extra = _extra(tensors)
    try:
        model.load_state_dict({**tensors, **extra})
    except RuntimeError as error:
        own = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        misfits = [*_misfits(own, set(own), tensors, model)][:TOLD] or [" ".join(str(error).split())]
        raise ValueError("; ".join(each[:200] for each in misfits)) from error


def _extra(found: dict[str, Tensor]) -> dict[str, Any]:
    """Take out of a file what is there as JSON, and return it by its name; raise ValueError where it is no JSON."""
    names = [name for name in found if name.endswith(f"_extra_state{AS_JSON}")]
    try:
        return {name.removesuffix(AS_JSON): json.loads(found.pop(name).numpy().tobytes()) for name in names}
    except (RecursionError, TypeError) as error:  # TypeError: NumPy lacks the dtype
        raise ValueError(f"an extra state cannot be read: {error}") from error


def initialise(model: nn.Module, place: str, expected: str, keep: Sequence[str] = ()) -> None:
    """Copy a checkpoint into a plain model, by name and in the model's dtypes; what fits nowhere is refused.

    Names may have what DataParallel, torch.compile or a transformers model with a head puts before them, or lack it. Of
    tied parameters one name suffices.

    Args:
        place: path or URI of a .safetensors file, or of what torch.save wrote: tensors by name, or a checkpoint that
            has them as `state_dict`, say. Nothing in it is run.
        expected: SHA-256 of its bytes
        keep: patterns on the names of what keeps its initialisation

    Raises:
        CheckpointError: it is not there, not what was planned with, damaged, no checkpoint, or another network's
    """
    said = f"`model.weights` (={redact(place)})"
    with _at_hand(place, expected, said) as path:
        found = _read(path, said)
        extra = {name: value for name, value in _extra(found).items() if name in model.state_dict()}
        own = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        for pattern in keep:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise CheckpointError(f"`model.reinitialise` (={pattern}) matches no parameter of the network.")
        taken = {name for name in own if not any(fnmatchcase(name, pattern) for pattern in keep)}
        named = {_own_name(name, own, model): value for name, value in found.items()}
        infinite = [name for name, value in named.items() if name in taken and not bool(value.isfinite().all())]
        if infinite:
            raise CheckpointError(
                f"{said} holds NaN or an infinity in `{infinite[0]}`: its training diverged; pass an earlier one."
            )
        misfits = list(_misfits(own, taken, named, model))
        if misfits:
            more = f", and {len(misfits) - TOLD} more" if len(misfits) > TOLD else ""
            raise CheckpointError(
                f"{said} is not of this network: {'; '.join(misfits[:TOLD])}{more}; choose the model that it was saved "
                "from, or name what is to keep its initialisation, as in model.reinitialise=['fc.*']."
            )
        with torch.no_grad():
            for name in taken & set(named):
                own[name].copy_(named[name])
        model.load_state_dict(extra, strict=False)


@contextmanager
def _at_hand(place: str, expected: str, said: str) -> Iterator[Path]:
    """Give the path of a file on this node whose bytes are as expected; one from elsewhere is kept for the next."""
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
        except Exception as error:  # whatever a file system's library raises
            reason = redact(" ".join(str(error).split()) or type(error).__name__)
            raise CheckpointError(
                f"{said} cannot be read on this node: {reason}; put it where every node can."
            ) from error
        if digest != expected:
            path.unlink() if "://" in place else None
            raise CheckpointError(
                f"{said} is not what the sweep was planned with: it was changed since, or this node has another; run "
                "the same command again."
            )
        yield path


def _read(path: Path, said: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, mapped from the file where its format allows."""
    try:
        if ".safetensors" in path.suffixes:
            return tensors_in(path)
        with warnings.catch_warnings(action="ignore"):  # of pickles that torch.save did not write
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, LookupError) as error:
        if "Unsupported global" in str(error):
            raise CheckpointError(
                f"{said} names code, or is damaged, and nothing in a checkpoint is run; save it anew by "
                "torch.save(model.state_dict(), ...) or as .safetensors."
            ) from error
        reason = "" if isinstance(error, RuntimeError) else f" ({type(error).__name__})"  # whose text is of archives
        raise CheckpointError(
            f"{said} is damaged, or no file of weights{reason}; copy it again, or save it by "
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
            f"{said} holds {type(state).__name__} and no tensors by name; save it by "
            "torch.save(model.state_dict(), ...)."
        )
    return tensors


def _own_name(name: str, own: Mapping[str, Tensor], model: nn.Module) -> str:
    """Return what a network calls what its checkpoint calls `name`; as it is where it has nothing like that."""
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
    """Yield the bytes of a tensor in row-major order, copying at most `PIECE` of them, or one row, at a time."""
    rows = tensor.detach()
    if rows.is_contiguous():
        rows = rows.flatten()
    count = max(1, PIECE // max(1, rows[:1].nbytes))
    for start in range(0, len(rows), count):
        yield rows[start : start + count].cpu().contiguous().flatten().view(torch.uint8).numpy().data
