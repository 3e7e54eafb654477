"""Content of the files that a configuration names by path: keys hold the content, and workers get the path.

The files are checkpoints, directories with a model's configuration, and texts; none is imported or parsed here.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from orchestrator.catalogue.models import MODELS
from orchestrator.config.sources import content_digest
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.redact import redact

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
"""Suffixes of weight files: safetensors, then formats of torch.save."""
OTHER_SUFFIXES = (".ckpt", ".pkl", ".tar", ".h5", ".npz", ".onnx", ".gguf", ".msgpack")
"""Suffixes of weight files that cannot be read; a value with one is not a name on the hub."""
IN_A_FOLDER = ("model.safetensors", "pytorch_model.bin")
"""Names of the weight file in a directory of Hugging Face."""
TOKENIZERS = ("characters", "bytes")
"""Tokenizers that need no file."""


class Misplaced(Exception):
    """Path without usable content; the text continues a sentence that begins with key and value."""


def pinned(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `model` and `data` for a key, with digests in place of paths, and the paths for the worker.

    Paths are absolute, as a relative path could lead elsewhere on a worker.

    Args:
        config: configuration of a trial, without violations
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
        content = content_of_text(data["root"], data["tokenizer"], data["tests"])
        tests = {name: _absolute(path) for name, path in data["tests"].items()}
        places["data"] = {key: tests if key == "tests" else _absolute(data[key]) for key in content}
        places["data"]["content"] = content
        data |= content
    for key in ("root", "download"):
        if data.get("kind") not in (None, "text") and key in data:
            places["data"][key] = _absolute(data[key]) if key == "root" else data[key]
            del data[key]  # the content of a published set is pinned by checksums
    return parts, {name: place for name, place in places.items() if place}


def look_again() -> None:
    """Clear the cache, which is valid for one plan: many trials of a plan share their files."""
    _pinned.cache_clear()


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each file or package of `model` and `data` that is missing."""
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
        for name, path in data["tests"].items():
            yield from _missing(
                f"data.tests.{name}", path, partial(_text_content, path, f"+data.tests.{name}=book.txt")
            )


def _needless_revision(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for a revision without a name on the hub."""
    names = [model.get("weights"), model.get("path") if model.get("kind") == "huggingface" else None]
    given = [name for name in names if name]
    if model.get("revision") and given and all("://" in name or os.path.exists(_absolute(name)) for name in given):
        yield (
            f"`model.revision` (={model['revision']}) must be null, as {' and '.join(map(redact, given))} is a file, a "
            "directory or a URI, and not a name on the hub; leave `model.revision` out."
        )


def _missing(key: str, value: str, find: Callable[[], object]) -> Iterator[str]:
    try:
        find()
    except Misplaced as error:
        yield f"`{key}` (={redact(value)}) {error}"


def _weights(model: Mapping[str, Any]) -> str:
    return place_digest(checkpoint(model["weights"], model.get("revision")))


def releases(config: Mapping[str, Any]) -> dict[str, str]:
    """Return package -> release of the libraries behind the built-in parts of `config`."""
    return {library: release for _, _, library in _libraries(config) if (release := release_of(library))}


def _libraries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield part, key and package for each part that needs another package; its release is part of the key."""
    model = MODELS.get(str(config["model"].get("kind")))
    yield from (("model", "kind", package) for package in (model.packages if model else ()))
    if config["data"].get("kind") == "text" and config["data"]["tokenizer"] not in TOKENIZERS:
        yield "data", "tokenizer", "tokenizers"


def checkpoint(value: str, revision: str | None = None) -> str:
    """Return the absolute path or the URI of the weight file that `value` names.

    Args:
        value: a file, a directory of Hugging Face, a URI, or a name on the hub whose files are on this machine
        revision: revision of that name; a branch or tag stands for the commit on this machine

    Raises:
        Misplaced: there is no such file; the text gives the reason
    """
    if not value:
        raise Misplaced("must be a file, a directory or a name on the hub; pass null for initial weights.")
    if "://" in value or value.endswith(OTHER_SUFFIXES):
        _require_suffix(value)
        return value
    path = Path(_absolute(value))
    if path.is_file():
        _require_suffix(value)
        return str(path)
    if not path.is_dir():
        if path.suffix in SUFFIXES or not _is_hub_name(value):
            raise Misplaced("cannot be read: there is no such file; check the path, relative to the working directory.")
        path = hub_folder(value, revision)
    found = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None)
    if found is None:
        raise Misplaced(f"is a directory without {' or '.join(IN_A_FOLDER)}; pass the file itself.")
    return str(found)


def config_folder(value: str, revision: str | None = None) -> str:
    """Return the absolute path of a directory with a config.json: `value` itself, or a name on the hub.

    Raises:
        Misplaced: there is no such directory; the text gives the reason
    """
    path = Path(_absolute(value))
    if not path.exists() and _is_hub_name(value):
        path = hub_folder(value, revision)
    if not value or not (path / "config.json").is_file():
        raise Misplaced("must be a directory with a config.json, as save_pretrained of transformers writes it.")
    return str(path)


def texts(root: str, example: str = "data.root=book.txt") -> list[str]:
    """Return the sorted paths of the files of a text.

    Args:
        root: a text file, or a directory
        example: setting that the message of an error gives as an example

    Raises:
        Misplaced: there are no files
    """
    path = Path(_absolute(root))
    found = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not root or not found:
        raise Misplaced(f"must be an existing text file, or a directory of .txt files; pass {example}, for example.")
    return [str(each) for each in found]


def content_of_text(root: str, tokenizer: str, tests: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return by key the digest of a text, of its tokenizer file if there is one, and of further texts if there are any.

    Raises:
        Misplaced: a file is missing, or cannot be read
    """
    found: dict[str, Any] = {"root": _text_content(root)}
    found |= {} if tokenizer in TOKENIZERS else {"tokenizer": _tokenizer_content(tokenizer)}
    return found | ({"tests": {name: _text_content(path) for name, path in tests.items()}} if tests else {})


def _text_content(root: str, example: str = "data.root=book.txt") -> str:
    return digest(canonical_json([place_digest(path) for path in texts(root, example)]))


def _tokenizer_content(tokenizer: str) -> str:
    if tokenizer not in TOKENIZERS and not Path(_absolute(tokenizer)).is_file():
        raise Misplaced(f"must be {' or '.join(TOKENIZERS)}, or a file saved by the package tokenizers.")
    return tokenizer if tokenizer in TOKENIZERS else place_digest(_absolute(tokenizer))


def hub_folder(name: str, revision: str | None) -> Path:
    """Return the local folder with the files of a model on the Hugging Face hub, at one commit.

    Nothing is downloaded, so that a plan needs no network.

    Raises:
        Misplaced: the files are not on this machine
    """
    wanted = f"{name} --revision {revision}" if revision else name
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        raise Misplaced(
            "is not a file or directory; for a name on the hub, pip install huggingface_hub; or pass a file."
        ) from None
    try:
        return Path(_absolute(snapshot_download(name, revision=revision, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        at = f" at revision {revision}" if revision else ""
        raise Misplaced(
            f"is not a file or directory, and this machine has no commit{at} of a hub model of that name; run "
            f"`hf download {wanted}` first, or pass a file."
        ) from None


def place_digest(place: str) -> str:
    """Return the SHA-256 of a file at a path or URI; an unchanged file is not read again.

    Raises:
        Misplaced: the file cannot be read
    """
    try:
        if "://" not in place:
            return content_digest(place)
        import fsspec  # takes 50 ms, needed only for URIs

        system, path = fsspec.core.url_to_fs(place)
        return _remote_digest(place, str(system.ukey(path)))
    except Exception as error:  # a file system's library may raise anything
        said = redact(" ".join(str(error).split()) or type(error).__name__)
        raise Misplaced(f"cannot be read: {said}; check the address and the credentials.") from None


@lru_cache(maxsize=1024)
def _remote_digest(uri: str, _version: str) -> str:
    import fsspec

    with fsspec.open(uri, "rb") as file:
        found = hashlib.sha256()
        while piece := file.read(2**20):
            found.update(piece)
        return found.hexdigest()


def release_of(package: str) -> str | None:
    """Return the release of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_hub_name(value: str) -> bool:
    parts = value.split("/")
    return len(parts) <= 2 and all(part and part[0].isalnum() for part in parts)


def _require_suffix(value: str) -> None:
    if not value.endswith(SUFFIXES):
        raise Misplaced(f"must end in one of {', '.join(SUFFIXES)}, as the suffix tells the format; rename the file.")
