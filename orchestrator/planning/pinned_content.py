"""Content of the files that a configuration names by path: keys hold the content, and workers get the path.

The files are checkpoints, directories with a model's configuration, and texts; no code in them is run.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from orchestrator.catalogue.data import DATA
from orchestrator.catalogue.models import MODELS
from orchestrator.config.sources import content_digest
from orchestrator.core.plain_data import canonical_json, digest
from orchestrator.core.redact import redact
from orchestrator.planning.file_places import (
    GGUF,
    JSON_LINES,
    Misplaced,
    absolute,
    box_places,
    checkpoint,
    config_place,
    is_uri,
    parts_of_weights,
    texts,
    tokenizer_file,
    tokenizer_place,
)
from pruning.catalogue.rows import is_int

TOKENIZERS = ("characters", "bytes")
"""Tokenizers that need no file."""
PINNED = ("model", "data", "task")
"""Parts of a configuration that name files."""
LOADS_GGUF = "accelerate"
"""Package without which transformers loads no .gguf file."""
POSITIONS = ("max_position_embeddings", "n_positions")
"""Keys of configurations of transformers with the number of positions."""
OF_MODEL = "model"
"""Value of `data.tokenizer` for the tokenizer in the directory or the .gguf file of the network."""


def pinned(config: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `model`, `data` and `task` for a key, with digests in place of paths, and the paths for the worker.

    Paths are absolute, as a relative path could lead elsewhere on a worker.

    Args:
        config: configuration of a trial, without violations
    """
    parts, places = _pinned(canonical_json([config[name] for name in PINNED]))
    return {**parts}, {**places}


@lru_cache(maxsize=1024)
def _pinned(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    parts = dict(zip(PINNED, json.loads(text), strict=True))
    places: dict[str, dict[str, Any]] = {name: {} for name in PINNED}
    model, data = parts["model"], parts["data"]
    if data.get("kind") == "text":
        data["tokenizer"] = _tokenizer(model, data["tokenizer"])
    found = config_of(model) if from_transformers(model) else None
    revision = model.pop("revision", None)
    if model.get("weights") is not None:
        places["model"]["weights"] = place = checkpoint(model["weights"], revision)
        model["weights"] = weights_digest(place)
    if found is not None:
        model["path"] = place_digest(found)
        path = found if found.endswith(GGUF) else os.path.dirname(found)
        places["model"] |= {"path": path, "content": model["path"]}
    if data.get("kind") == "text":
        further = data.get("tests") or {}  # a sweep that was saved before this option has none
        content = content_of_text(data["root"], data["tokenizer"], further)
        tests = {name: absolute(path) for name, path in further.items()}
        places["data"] = {key: tests if key == "tests" else absolute(data[key]) for key in content}
        places["data"]["content"] = content
        data |= content
    for key in box_files(data):
        places["data"] |= {key: absolute(data[key])}
        data[key] = _boxes_content(data, key)
    if data.get("images") and box_files(data):
        places["data"]["images"] = absolute(data.pop("images"))
    if file := passages_of(parts["task"]):
        sha256 = place_digest(absolute(file))
        parts["task"]["passages"] = sha256
        places["task"] = {"passages": absolute(file), "content": sha256}
    for key in ("root", "download"):
        if data.get("kind") not in (None, "text") and key in data:
            places["data"][key] = absolute(data[key]) if key == "root" else data[key]
            del data[key]  # the content of a published set is pinned by checksums
    return parts, {name: place for name, place in places.items() if place}


def look_again() -> None:
    """Clear the cache, which is valid for one plan: many trials of a plan share their files."""
    _pinned.cache_clear()


def violations(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each file or package of `model`, `data` and `task` that is missing or cannot be used."""
    for part, key, library in (*_libraries(config), *_without_effect(config)):
        if not release_of(library):
            yield (
                f"`{part}.{key}` (={config[part][key]}) needs the package {library}, which is not installed: "
                f"pip install {library}."
            )
    model, data = config["model"], config["data"]
    yield from _needless_revision(model)
    if model.get("weights") is not None:
        yield from unusable("model.weights", model["weights"], lambda: _weights(model))
    if from_transformers(model) and (model.get("path") or not model.get("weights")):
        yield from unusable("model.path", model.get("path", ""), lambda: config_of(model))
    elif from_transformers(model):
        yield from unusable("model.weights", model["weights"], lambda: config_of(model))
    if data.get("kind") == "text":
        yield from unusable("data.root", data["root"], lambda: content_of_text(data["root"], "bytes"))
        yield from unusable("data.tokenizer", data["tokenizer"], lambda: _tokenizer_content(model, data["tokenizer"]))
        yield from _other_tokens(model, data["tokenizer"])
        for name, path in data["tests"].items():
            yield from unusable(f"data.tests.{name}", path, partial(_other_text, data["root"], name, path))
        yield from beyond_positions(data, model, trained_positions(configuration(model)))
    for key in box_files(data):
        yield from unusable(f"data.{key}", data[key], partial(_boxes_content, data, key))
    if (path := passages_of(config["task"])) is not None:
        yield from unusable("task.passages", path, partial(passages, path))


def box_files(data: Mapping[str, Any]) -> list[str]:
    """Return the keys of `data` that name images with boxes."""
    row = DATA.get(str(data.get("kind")))
    return [key for key in (row.files if row else ()) if data.get(key) is not None]


def _boxes_content(data: Mapping[str, Any], key: str) -> str:
    """Return the digest of the annotations and images of a split."""
    return digest(canonical_json([content_digest(each) for each in box_places(data[key], data.get("images"))]))


def too_short(data: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each part of a text with too few bytes for a block, as a token has at least a byte."""
    block, count = data["block"], data["test_size"]
    with suppress(Misplaced, OSError):
        whole = text_size(data["root"])
        test = round(whole * data["test_fraction"]) if count is None else min(whole, count * block + 1)
        parts = {"training part of `data.root`": whole - test, "test part of `data.root`": test}
        found = [(part, size, f"{size} of {whole}") for part, size in parts.items()]
        for name, path in data["tests"].items():
            found.append((f"text `data.tests.{name}`", size := text_size(path), str(size)))
        yield from (
            f"`data.block` (={block}) must be less than the tokens of each part of a text, but the {part} has {told} "
            "bytes; use more text, or pass a smaller data.block."
            for part, size, told in found
            if size <= block
        )


def beyond_positions(data: Mapping[str, Any], model: Mapping[str, Any], most: int | None) -> Iterator[str]:
    """Yield an error for blocks with more tokens than a network has positions: further ones it never learned.

    Args:
        data: `data` of a configuration.
        model: `model` of a configuration.
        most: number of positions of the network; None if its configuration names none.
    """
    block = data.get("block")
    if most is not None and is_int(block) and block > most:
        more = "use a `model` with more"
        if from_transformers(model):
            more = f"to go beyond them on purpose, pass +model.overrides.max_position_embeddings={block}"
        yield (
            f"`data.block` (={block}) must be at most {most}, the number of positions of `model` "
            f"(={model.get('kind') or model.get('_target_')}); pass data.block={most}, or {more}."
        )


def trained_positions(config: Mapping[str, Any]) -> int | None:
    """Return the number of positions that a configuration of transformers names, at the top or for its text part."""
    whole = {**(config.get("text_config") or {}), **config}
    return next((whole[key] for key in POSITIONS if is_int(whole.get(key)) and whole[key] > 0), None)


def configuration(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a network's config.json with its `overrides`, or `config` of a target; what cannot be read is left out."""
    try:
        place = config_of(model)
        found = {} if place.endswith(GGUF) else json.loads(Path(place).read_bytes())
    except (Misplaced, OSError, ValueError):
        found = {}
    return {**found, **model.get("overrides", {}), **(model.get("config") or {})}


def from_transformers(model: Mapping[str, Any]) -> bool:
    """Return whether a network is built by transformers, from a configuration in a file."""
    row = MODELS.get(str(model.get("kind")))
    return row is not None and row.packages == ("transformers",)


def without_weights(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's configuration with random weights; its `path` still tells where its configuration lies."""
    path = {"path": model.get("path") or model.get("weights")} if from_transformers(model) else {}
    return {**model, **path, "weights": None}


def config_of(model: Mapping[str, Any]) -> str:
    """Return the file with the configuration of a network of transformers, which `path` names, else `weights`."""
    return config_place(model.get("path") or model.get("weights") or "", model.get("revision"))


def _tokenizer(model: Mapping[str, Any], value: str) -> str:
    """Return a name of `TOKENIZERS`, or the path of the tokenizer's file."""
    if value != OF_MODEL or not from_transformers(model):
        return value if value in TOKENIZERS else tokenizer_file(value)
    return tokenizer_place(config_of(model))


def _other_tokens(model: Mapping[str, Any], tokenizer: str) -> Iterator[str]:
    """Yield an error for characters or bytes if the directory or file of the loaded weights has a tokenizer."""
    if tokenizer not in TOKENIZERS or not from_transformers(model) or model.get("weights") is None:
        return
    try:
        tokenizer_place(config_place(model["weights"], model.get("revision")))
    except (Misplaced, OSError):
        return
    yield (
        f"`data.tokenizer` (={tokenizer}) must be the tokenizer with which `model.weights` were trained; pass "
        "data.tokenizer=model."
    )


def _needless_revision(model: Mapping[str, Any]) -> Iterator[str]:
    """Yield an error for a revision without a name on the hub."""
    names = [model.get("weights"), model.get("path") if from_transformers(model) else None]
    given = [name for name in names if name]
    if model.get("revision") and given and all("://" in name or os.path.exists(absolute(name)) for name in given):
        yield (
            f"`model.revision` (={model['revision']}) must be null, as {' and '.join(map(redact, given))} is a file, a "
            "directory or a URI, and not a name on the hub; leave `model.revision` out."
        )


def unusable(key: str, value: str, find: Callable[[], object]) -> Iterator[str]:
    """Yield the error of a key whose file `find` cannot find or use."""
    try:
        find()
    except Misplaced as error:
        yield f"`{key}` (={redact(value)}) {error}"


def _weights(model: Mapping[str, Any]) -> str:
    return weights_digest(checkpoint(model["weights"], model.get("revision")))


def releases(config: Mapping[str, Any]) -> dict[str, str]:
    """Return package -> release of the libraries behind the built-in parts of `config`."""
    return {library: release for _, _, library in _libraries(config) if (release := release_of(library))}


def _libraries(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield part, key and package for each part that needs another package; its release is part of the key."""
    model = MODELS.get(str(config["model"].get("kind")))
    yield from (("model", "kind", package) for package in (model.packages if model else ()))
    data = config["data"]
    tokenizer = data["tokenizer"] if data.get("kind") == "text" else TOKENIZERS[0]
    if tokenizer not in TOKENIZERS:
        yield "data", "tokenizer", "tokenizers"
    if _from_gguf(config):
        yield "model", "weights", "gguf"
    if str(tokenizer).endswith(GGUF):
        yield from (("data", "tokenizer", package) for package in ("transformers", "gguf"))


def _without_effect(config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield part, key and package for packages that must be installed and change no result, so are in no key."""
    if _from_gguf(config):
        yield "model", "weights", LOADS_GGUF


def _from_gguf(config: Mapping[str, Any]) -> bool:
    return any(str(config["model"].get(key)).endswith(GGUF) for key in ("weights", "path"))


def content_of_text(root: str, tokenizer: str, tests: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return by key the digest of a text, of its tokenizer file if there is one, and of further texts if there are any.

    Raises:
        Misplaced: a file is missing, or cannot be read
    """
    found: dict[str, Any] = {"root": _text_content(root)}
    found |= {} if tokenizer in TOKENIZERS else {"tokenizer": _tokenizer_content({}, tokenizer)}
    return found | ({"tests": {name: _text_content(path) for name, path in tests.items()}} if tests else {})


def _text_content(root: str, example: str = "data.root=book.txt") -> str:
    return digest(canonical_json([_text_digest(path) for path in texts(root, example)]))


def text_size(root: str) -> int:
    """Return the bytes of a text."""
    return sum(len(text_bytes(path)) if path.endswith(".py") else os.path.getsize(path) for path in texts(root))


def text_bytes(path: str) -> bytes:
    """Return the text in a file; the text in a Python module is its longest string, which is read, not run.

    Raises:
        Misplaced: the module cannot be parsed, or holds no string
    """
    content = Path(path).read_bytes()
    if not path.endswith(".py"):
        return content
    try:
        nodes = ast.walk(ast.parse(content))
        strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        return max(strings, key=len).encode()
    except (SyntaxError, ValueError) as error:
        raise Misplaced(f"has no text in {os.path.basename(path)}: {error}; pass a text file.") from None


def passages_of(task: Mapping[str, Any]) -> str | None:
    """Return the file of passages that a task names; None if it names none."""
    found: str | None = task.get("passages") if task.get("kind") == "language_modelling" else None
    return found


def passages(path: str) -> tuple[str, ...]:
    """Return the passages in a file: its lines, or `text` of each line of JSON; empty lines are left out.

    Raises:
        Misplaced: the file is missing, empty, or not text, or a passage has fewer than two words
    """
    place = absolute(path)
    if not os.path.isfile(place):
        raise Misplaced("must be an existing file of passages; pass task.passages=lambada.jsonl, for example.")
    return _passages(place, place_digest(place))


@lru_cache(maxsize=16)
def _passages(place: str, _digest: str) -> tuple[str, ...]:
    try:
        whole = Path(place).read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Misplaced(f"must be text in UTF-8 (byte {error.start}: {error.reason}); convert it.") from None
    lines = [(number, line.strip()) for number, line in enumerate(whole.split("\n"), start=1) if line.strip()]
    if not lines:
        raise Misplaced("must have passages, but is empty; pass a file with one passage a line, or JSON lines.")
    is_json = place.endswith(JSON_LINES) or lines[0][1].startswith(("{", "[{"))
    found = {number: _text_of(line, number) if is_json else line for number, line in lines}
    if short := [number for number, text in found.items() if len(text.split()) < 2]:
        raise Misplaced(
            f"must have at least two words in each passage, but line {short[0]} is {found[short[0]]!r}; the last word "
            "is predicted from the words before it: leave this line out."
        )
    return tuple(found.values())


def _text_of(line: str, number: int) -> str:
    """Return `text` in a line of JSON; raise Misplaced without it."""
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str) or text.encode(errors="replace").decode() != text:
        raise Misplaced(
            f'must have {{"text": "..."}} in each line, as LAMBADA has, but line {number} has no such text.'
        )
    return text


def _other_text(root: str, name: str, path: str) -> None:
    """Raise Misplaced if a further text is missing, or is the text that the network is trained and calibrated on."""
    if _text_content(path, f"+data.tests.{name}=book.txt") == _text_content(root):
        raise Misplaced("must be another text than `data.root`, which calibrates and trains; leave it out.")


def _text_digest(path: str) -> str:
    return hashlib.sha256(text_bytes(path)).hexdigest() if path.endswith(".py") else place_digest(path)


def _tokenizer_content(model: Mapping[str, Any], tokenizer: str) -> str:
    if tokenizer == OF_MODEL and not from_transformers(model):
        raise Misplaced("needs a network of transformers, as in model=huggingface; pass characters, or a file.")
    found = _tokenizer(model, tokenizer)
    return found if found in TOKENIZERS else place_digest(found)


def place_digest(place: str) -> str:
    """Return the SHA-256 of a file at a path or URI; an unchanged file is not read again.

    Raises:
        Misplaced: the file cannot be read
    """
    try:
        if not is_uri(place):
            return content_digest(place)
        import fsspec  # takes 50 ms, needed only for URIs

        system, path = fsspec.core.url_to_fs(place)
        return _remote_digest(place, str(system.ukey(path)))
    except Exception as error:  # a file system's library may raise anything
        said = redact(" ".join(str(error).split()) or type(error).__name__)
        raise Misplaced(f"cannot be read: {said}; check the address and the credentials.") from None


def weights_digest(place: str, digest_of: Callable[[str], str] = place_digest) -> str:
    """Return the SHA-256 of a weight file; of the digests of all files for weights in several files.

    Args:
        place: absolute path or URI, as `checkpoint` returns it
        digest_of: returns the SHA-256 of one file

    Raises:
        Misplaced: a file is missing, or cannot be read
    """
    found = [digest_of(path) for path in parts_of_weights(place)]
    return found[0] if len(found) == 1 else digest(canonical_json(found))


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
