"""What a configuration names by where it lies: its content goes into keys, and where it lies only to the worker.

A checkpoint, the directory of a model's configuration, the files of a text: none is imported or parsed here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import fsspec

from orchestrator.config.sources import content_digest
from orchestrator.core.redact import redact

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Of files of weights: the first is safetensors, the others are what torch.save writes."""
IN_A_FOLDER = ("model.safetensors", "pytorch_model.bin")
"""What a directory of Hugging Face's calls its weights."""
LIBRARIES = {"huggingface": "transformers", "timm": "timm"}
"""Kind of model -> the package that builds it: its release is part of the key."""


class Misplaced(Exception):
    """Nothing that can be used lies there; the text continues a sentence that begins with key and value."""


def pinned(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `model` and `data` as they go into a key, contents for places, and for the worker these places.

    A relative path would be another one on every worker, so places are absolute.

    Args:
        config: of a trial, without violations
    """
    parts = {name: dict(config[name]) for name in ("model", "data")}
    places: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    model, data = parts["model"], parts["data"]
    if model.get("weights") is not None:
        places["model"]["weights"] = place = checkpoint(model["weights"], model.get("revision"))
        model["weights"] = place_digest(place)
    model.pop("revision", None)
    for key in ("root", "download"):
        if "kind" in data and key in data:
            places["data"][key] = os.path.abspath(data[key]) if key == "root" else data[key]
            del data[key]  # the content of a published set is pinned by checksums
    return parts, {name: place for name, place in places.items() if place}


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each thing that does not lie where `model` and `data` say."""
    model = config["model"]
    if (library := LIBRARIES.get(model.get("kind"))) and not _release(library):
        yield (
            f"`model.kind` (={model['kind']}) needs the package {library}, which is not installed: "
            f"pip install 'pruning-orchestrator[{library}]'."
        )
    if model.get("weights") is not None:
        try:
            place_digest(checkpoint(model["weights"], model.get("revision")))
        except Misplaced as error:
            yield f"`model.weights` (={redact(model['weights'])}) {error}"


def releases(config: Mapping[str, Any]) -> dict[str, str]:
    """Return package -> release of the libraries that build the built-in parts of `config`."""
    library = LIBRARIES.get(config["model"].get("kind"))
    return {library: release} if library and (release := _release(library)) else {}


def checkpoint(value: str, revision: str | None = None) -> str:
    """Return the absolute path or the URI of the file of weights that `value` names.

    Args:
        value: a file, a directory of Hugging Face's, a URI, or a name on the hub whose files are on this machine
        revision: of that name; a branch or tag is the commit that it was here

    Raises:
        Misplaced: there is none; says why
    """
    if "://" in value:
        _require_suffix(value)
        return value
    path = Path(value).expanduser()
    if path.is_file():
        _require_suffix(value)
        return os.path.abspath(path)
    if not path.is_dir():
        if path.suffix in SUFFIXES or not _is_hub_name(value):
            raise Misplaced("cannot be read: there is no such file; check the path, relative to where you are.")
        path = hub_folder(value, revision)
    found = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None)
    if found is None:
        raise Misplaced(f"is a directory without {' or '.join(IN_A_FOLDER)}; pass the file itself.")
    return os.path.abspath(found)


def hub_folder(name: str, revision: str | None) -> Path:
    """Return where the files of a model on the Hugging Face hub are on this machine, in the folder of their commit.

    Raises:
        Misplaced: they are not; nothing is downloaded here, so that a plan needs no network
    """
    wanted = f"{name} --revision {revision}" if revision else name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise Misplaced(
            "is no file or directory, and names on the hub need the package huggingface_hub: pip install it, or pass a "
            "file."
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        at = f" at revision {revision}" if revision else ""
        raise Misplaced(
            f"is no file or directory, and of the hub's model of that name this machine holds no commit{at}; run "
            f"`hf download {wanted}` first, or pass a file."
        ) from None


def place_digest(place: str) -> str:
    """Return the SHA-256 of the bytes of a file at a path or URI, read again only if it changed.

    Raises:
        Misplaced: it cannot be read
    """
    try:
        if "://" not in place:
            return content_digest(place)
        system, path = fsspec.core.url_to_fs(place)
        return _remote_digest(place, str(system.ukey(path)))
    except Exception as error:  # whatever a file system's library raises
        said = redact(" ".join(str(error).split()) or type(error).__name__)
        raise Misplaced(f"cannot be read: {said}; check it, and what gives access to it.") from None


@lru_cache(maxsize=1024)
def _remote_digest(uri: str, _version: str) -> str:
    with fsspec.open(uri, "rb") as file:
        found = hashlib.sha256()
        while piece := file.read(2**20):
            found.update(piece)
        return found.hexdigest()


def _release(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_hub_name(value: str) -> bool:
    parts = value.split("/")
    return len(parts) <= 2 and all(part and part[0].isalnum() for part in parts)


def _require_suffix(value: str) -> None:
    if not value.endswith(SUFFIXES):
        raise Misplaced(f"must end in one of {', '.join(SUFFIXES)}: what it holds is told by that; rename it.")
