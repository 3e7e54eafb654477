"""Initial weights of a network from a checkpoint: files of torch, safetensors and GGUF, matched by name."""

from __future__ import annotations

import pickle
import shutil
import tempfile
import uuid
import warnings
import zipfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor, nn

from orchestrator.config.sources import file_digest
from orchestrator.core.redact import redact
from orchestrator.planning.file_places import GGUF, INDEX, is_uri, parts_of_weights
from orchestrator.planning.number_formats import first_few
from orchestrator.planning.pinned_content import weights_digest
from orchestrator.store.finished_stages import tensors_in
from orchestrator.store.local_backend import node_folder, tidy
from orchestrator.workloads.networks.gguf_files import read_gguf
from orchestrator.workloads.weight_files import LISTED, PIECE, CheckpointError, extra_state, misfits
from pruning.reconstruction.converted_weights import Conversion, conversions

WRAPPERS = ("module.", "_orig_mod.")
"""Prefixes that DataParallel and torch.compile put before the names of parameters."""
STATES = ("state_dict", "model_state_dict", "model")
"""Keys under which a larger checkpoint stores the weights."""


def initialise(model: nn.Module, place: str, expected: str, keep: Sequence[str] = ()) -> None:
    """Copy a checkpoint into a plain model, by name and in the model's dtypes; refuse tensors that do not fit.

    Names may have, or lack, the prefix that DataParallel, torch.compile or a transformers model with a head puts before
    them. One name is enough for tied parameters. Tensors that transformers converts while it loads, such as the
    matrices of single experts, are converted by it.

    Args:
        model: the network.
        place: path or URI of a .safetensors or .gguf file, of the index of several .safetensors files, or of a file
            from torch.save: tensors by name, or a checkpoint that holds them, for example as `state_dict`. Code in the
            file is never run.
        expected: SHA-256 of the file's bytes; for an index, the digest of `weights_digest`
        keep: patterns on the names of tensors that keep their initialisation

    Raises:
        CheckpointError: the file is absent, damaged, not a checkpoint, or different from the planned one, or it belongs
            to another network
    """
    said = f"`model.weights` (={redact(place)})"
    with _local_file(place, expected, said) as path:
        found = _read(path, expected, said)
        extra = {name: value for name, value in extra_state(found).items() if name in model.state_dict()}
        own = {name: each for name, each in model.state_dict().items() if isinstance(each, Tensor)}
        for pattern in keep:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise CheckpointError(f"`model.reinitialise` (={pattern}) matches no parameter of the network.")
        taken = {name for name in own if not any(fnmatchcase(name, pattern) for pattern in keep)}
        found = {_without_wrapper(name, own): value for name, value in found.items()}
        made, faults = _conversions(model, found, own, taken)
        infinite = [
            n for each in made if taken & {*each.targets} for n in each.sources if not bool(found[n].isfinite().all())
        ]
        if infinite:
            raise CheckpointError(
                f"{said} contains NaN or infinity in `{infinite[0]}`: its training diverged; pass an earlier one."
            )
        named = {n: own[n] if each.convert else found[each.sources[0]] for each in made for n in each.targets}
        wrong = [*faults, *misfits(own, taken, named, model)]
        if wrong:
            raise CheckpointError(
                f"{said} does not fit this network: {first_few(wrong, LISTED)}; choose the model that it was "
                "saved from, or name the tensors that keep their initialisation, as in model.reinitialise=['fc.*']."
            )
        with torch.no_grad():
            for each in made:
                for name, value in each.tensors(found.__getitem__).items():
                    if name in taken:
                        own[name].copy_(value)
        model.load_state_dict(extra, strict=False)


@contextmanager
def _local_file(place: str, expected: str, said: str) -> Iterator[Path]:
    """Yield the path of a file on this node whose bytes are as expected.

    A downloaded file is cached in the node's folder, if there is one.
    """
    folder = node_folder()
    with tempfile.TemporaryDirectory() as own:
        try:
            if is_uri(place):
                path = Path(folder or own, f"{expected}{Path(place).suffix}.checkpoint")
                if not path.is_file():
                    aside = path.with_name(f".{uuid.uuid4().hex}")
                    with fsspec.open(place, "rb") as source, open(aside, "wb") as file:
                        shutil.copyfileobj(source, file, PIECE)
                    aside.replace(path)
                    tidy(path.parent, path.suffix)
            else:
                path = Path(place)
            found = weights_digest(str(path), file_digest)
        except Exception as error:  # libraries of file systems raise many types
            reason = redact(" ".join(str(error).split()) or type(error).__name__)
            raise CheckpointError(
                f"{said} cannot be read on this node: {reason}; put the file where every node can read it."
            ) from error
        if found != expected:
            path.unlink() if is_uri(place) else None
            raise CheckpointError(
                f"{said} must be the file that the sweep was planned with, but it has changed, or this node has "
                "another; run the same command again."
            )
        yield path


def _read(path: Path, content: str, said: str) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint by name, mapped from the file if its format allows."""
    if GGUF in path.suffixes:
        return dict(read_gguf(str(path), content, said).weights)
    try:
        if path.name == INDEX:
            files = map(Path, parts_of_weights(str(path))[1:])
            return {name: tensor for file in files for name, tensor in tensors_in(file).items()}
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


def _conversions(
    model: nn.Module, found: Mapping[str, Tensor], own: Mapping[str, Tensor], taken: set[str]
) -> tuple[list[Conversion], list[str]]:
    """Return the conversions of a checkpoint's tensors to those of a network, and what makes some impossible.

    Args:
        model: the network.
        found: the checkpoint's tensors by name.
        own: the network's tensors by name.
        taken: names of the tensors to load.
    """
    plan = conversions(model, found, taken)
    made = [
        each if each.convert else Conversion(each.sources, (_name_in_network(each.targets[0], own, model),))
        for each in plan.each
    ]
    return made, [
        f"the file lacks `{name}`"
        if shape is None
        else f"`{name}` is {list(shape)} in the file and {list(expected)} in the network"
        for name, shape, expected in plan.faults
    ]


def _without_wrapper(name: str, own: Collection[str]) -> str:
    """Return a checkpoint's name without the prefix of DataParallel or torch.compile."""
    wrapper = next((each for each in WRAPPERS if name.startswith(each) and name not in own), "")
    return name.removeprefix(wrapper)


def _name_in_network(name: str, own: Collection[str], model: nn.Module) -> str:
    """Return the network's name for the checkpoint's `name`; `name` itself if the network has no similar one."""
    head = f"{getattr(model, 'base_model_prefix', '')}."
    return next((form for form in (name, head + name, name.removeprefix(head)) if form in own), name)
