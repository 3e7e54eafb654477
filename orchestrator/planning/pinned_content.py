"""What a configuration names by where it lies: its content goes into keys, and where it lies only to the worker.

A checkpoint, the directory of a model's configuration, the files of a text: none is imported or parsed here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from orchestrator.catalogue.models import MODELS
from orchestrator.config.sources import content_digest
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.redact import redact

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Of files of weights: the first is safetensors, the others are what torch.save writes."""
OTHER_SUFFIXES = (".ckpt", ".pkl", ".tar", ".h5", ".npz", ".onnx", ".gguf", ".msgpack")
"""Of files of weights that are not read: none of them is a name on the hub."""
IN_A_FOLDER = ("model.safetensors", "pytorch_model.bin")
"""What a directory of Hugging Face's calls its weights."""
TOKENIZERS = ("characters", "bytes")
"""What a text is cut into without a file."""


class Misplaced(Exception):
    """Nothing that can be used lies there; the text continues a sentence that begins with key and value."""


def pinned(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `model` and `data` as they go into a key, contents for places, and for the worker these places.

    A relative path would be another one on every worker, so places are absolute.

    Args:
        config: of a trial, without violations
    """
    parts, places = _pinned(canonical_json([config["model"], config["data"]]))
    return {**parts}, {**places}


@lru_cache(maxsize=1024)
def _pinned(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = dict(zip(("model", "data"), json.loads(text), strict=True))
    places: dict[str, dict[str, Any]] = {"model": {}, "data": {}}
    model, data = parts["model"], parts["data"]
    revision = model.pop("revision", None)
    if model.get("weights") is not None:
        places["model"]["weights"] = place = checkpoint(model["weights"], revision)
        model["weights"] = place_digest(place)
    if model.get("kind") == "huggingface":
        folder = config_folder(model["path"], revision)
        model["path"] = place_digest(f"{folder}/config.json")
        places["model"] |= {"path": folder, "content": model["path"]}
    if data.get("kind") == "text":
        content = content_of_text(data["root"], data["tokenizer"])
        places["data"] = {key: _absolute(data[key]) for key in content} | {"content": content}
        data |= content
    for key in ("root", "download"):
        if data.get("kind") not in (None, "text") and key in data:
            places["data"][key] = _absolute(data[key]) if key == "root" else data[key]
            del data[key]  # the content of a published set is pinned by checksums
    return parts, {name: place for name, place in places.items() if place}


def look_again() -> None:
    """Forget what lay where: a plan asks once for what many of its trials have, the next one anew."""
    _pinned.cache_clear()


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each thing that does not lie where `model` and `data` say."""
    for part, key, library in _libraries(config):
        if not release_of(library):
            yield (
                f"`{part}.{key}` (={config[part][key]}) needs the package {library}, which is not installed: "
                f"pip install {library}."
            )
    model, data = config["model"], config["data"]
    yield from _needless_revision(model)
    if model.get("weights") is not None:
        yield from _missing("model.weights", model["weights"], lambda: _weights(model))
    if model.get("kind") == "huggingface":
        yield from _missing("model.path", model["path"], lambda: config_folder(model["path"], model.get("revision")))
    if data.get("kind") == "text":
        yield from _missing("data.root", data["root"], lambda: content_of_text(data["root"], "bytes"))
        yield from _missing("data.tokenizer", data["tokenizer"], lambda: _tokenizer_content(data["tokenizer"]))


def _needless_revision(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is said of a revision where no name on the hub is given."""
    names = [model.get("weights"), model.get("path") if model.get("kind") == "huggingface" else None]
    given = [name for name in names if name]
    if model.get("revision") and given and all("://" in name or os.path.exists(_absolute(name)) for name in given):
        yield (
            f"`model.revision` (={model['revision']}) must be null where {' and '.join(map(redact, given))} is no name "
            "on the hub but a file, a directory or a URI; leave it out."
        )


def _missing(key: str, value: str, find: Callable[[], object]) -> Iterator[str]:
    try:
        find()
    except Misplaced as error:
        yield f"`{key}` (={redact(value)}) {error}"


def _weights(model: Mapping[str, Any]) -> str:
    return place_digest(checkpoint(model["weights"], model.get("revision")))


def releases(config: Mapping[str, Any]) -> dict[str, str]:
    """Return package -> release of the libraries that build the built-in parts of `config`."""
    return {library: release for _, _, library in _libraries(config) if (release := release_of(library))}


def _libraries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield part, key and package of what a package of its own reads or builds; its release is part of the key."""
    model = MODELS.get(str(config["model"].get("kind")))
    yield from (("model", "kind", package) for package in (model.packages if model else ()))
    if config["data"].get("kind") == "text" and config["data"]["tokenizer"] not in TOKENIZERS:
        yield "data", "tokenizer", "tokenizers"


def checkpoint(value: str, revision: str | None = None) -> str:
    """Return the absolute path or the URI of the file of weights that `value` names.

    Args:
        value: a file, a directory of Hugging Face's, a URI, or a name on the hub whose files are on this machine
        revision: of that name; a branch or tag is the commit that it was here

    Raises:
        Misplaced: there is none; says why
    """
    if not value:
        raise Misplaced("must be a file, a directory or a name on the hub; pass null for the network as initialised.")
    if "://" in value or value.endswith(OTHER_SUFFIXES):
        _require_suffix(value)
        return value
    path = Path(_absolute(value))
    if path.is_file():
        _require_suffix(value)
        return str(path)
    if not path.is_dir():
        if path.suffix in SUFFIXES or not _is_hub_name(value):
            raise Misplaced("cannot be read: there is no such file; check the path, relative to where you are.")
        path = hub_folder(value, revision)
    found = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None)
    if found is None:
        raise Misplaced(f"is a directory without {' or '.join(IN_A_FOLDER)}; pass the file itself.")
    return str(found)


def config_folder(value: str, revision: str | None = None) -> str:
    """Return the absolute path of the directory with a config.json that `value` names: itself, or one of the hub's.

    Raises:
        Misplaced: there is none; says why
    """
    path = Path(_absolute(value))
    if not path.exists() and _is_hub_name(value):
        path = hub_folder(value, revision)
    if not value or not (path / "config.json").is_file():
        raise Misplaced("must be a directory with a config.json, as save_pretrained of transformers writes it.")
    return str(path)


def texts(root: str) -> list[str]:
    """Return the paths of the files of a text, in their order.

    Raises:
        Misplaced: there are none
    """
    path = Path(_absolute(root))
    found = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not root or not found:
        raise Misplaced(
            "must be a text file, or a directory of .txt files, and there is none; pass data.root=book.txt, say."
        )
    return [str(each) for each in found]


def content_of_text(root: str, tokenizer: str) -> dict[str, str]:
    """Return the digest of a text, and of its tokenizer where that is a file, by key.

    Raises:
        Misplaced: a file is not there, or cannot be read
    """
    found = {"root": digest(canonical_json([place_digest(path) for path in texts(root)]))}
    return found | ({} if tokenizer in TOKENIZERS else {"tokenizer": _tokenizer_content(tokenizer)})


def _tokenizer_content(tokenizer: str) -> str:
    if tokenizer not in TOKENIZERS and not Path(_absolute(tokenizer)).is_file():
        raise Misplaced(f"must be {' or '.join(TOKENIZERS)}, or a file that the package tokenizers has saved.")
    return tokenizer if tokenizer in TOKENIZERS else place_digest(_absolute(tokenizer))


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
        return Path(_absolute(snapshot_download(name, revision=revision, local_files_only=True)))
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
        import fsspec  # 50 ms, for URIs alone

        system, path = fsspec.core.url_to_fs(place)
        return _remote_digest(place, str(system.ukey(path)))
    except Exception as error:  # whatever a file system's library raises
        said = redact(" ".join(str(error).split()) or type(error).__name__)
        raise Misplaced(f"cannot be read: {said}; check it, and what gives access to it.") from None


@lru_cache(maxsize=1024)
def _remote_digest(uri: str, _version: str) -> str:
    import fsspec

    with fsspec.open(uri, "rb") as file:
        found = hashlib.sha256()
        while piece := file.read(2**20):
            found.update(piece)
        return found.hexdigest()


def release_of(package: str) -> str | None:
    """Return the release of an installed package, None where there is none."""
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
