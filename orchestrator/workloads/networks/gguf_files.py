"""Weights, configuration and tokenizer of a network in a .gguf file, converted by transformers once on each node."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from orchestrator.config.sources import file_digest
from orchestrator.core.errors import ModelError
from orchestrator.planning.number_formats import first_few
from orchestrator.planning.pinned_content import release_of
from orchestrator.workloads import node_cache

CONVERTERS = ("transformers", "gguf", "tokenizers")
"""Packages whose releases decide what a conversion gives."""
OF_FILE = ("_name_or_path", "_model_name_or_path", "quantization_config", "dtype", "transformers_version")
"""Keys of a configuration that tell of the file, and not of the network."""
WEIGHT, CONFIG, TOKENIZER = "weight:", "config", "tokenizer"
"""Names of the parts in the cached file; tensors are named by a prefix."""
LOCAL: Mapping[str, bool] = {"local_files_only": True, "trust_remote_code": False}
"""Arguments with which transformers reads files beside the .gguf file: no code in them, nothing from the hub."""
LISTED = 3
"""Number of missing tensors that a message lists."""


@dataclass(frozen=True)
class Converted:
    """Contents of a .gguf file in the forms of transformers."""

    weights: Mapping[str, Tensor]
    """Tensors of float32, by their names in the network."""
    config: Mapping[str, Any]
    """Keys of config.json."""
    tokenizer: str
    """JSON of the package tokenizers."""


def read_gguf(path: str, content: str | None, said: str) -> Converted:
    """Return the contents of a .gguf file, with quantised weights as float32.

    The conversion takes a minute or less for 100 MB; its result is cached in the node's folder.

    Args:
        path: the file.
        content: SHA-256 of the file, which was checked; None: compute it.
        said: key and value, for messages.

    Raises:
        ModelError: the file is damaged, of an unknown network, or lacks a tensor.
    """
    releases = {package: release_of(package) for package in CONVERTERS}
    source = {"gguf": content or file_digest(path), "releases": releases}
    held = node_cache.shared(source, lambda: _converted(path, said))
    return Converted(
        {name.removeprefix(WEIGHT): each for name, each in held.items() if name.startswith(WEIGHT)},
        json.loads(held[CONFIG].numpy().tobytes()),
        held[TOKENIZER].numpy().tobytes().decode(),
    )


def tokenizer_of(path: str, said: str) -> str:
    """Return the tokenizer in a .gguf file as JSON of the package tokenizers.

    Raises:
        ModelError: as `read_gguf`
    """
    return _tokenizer_of(path, file_digest(path), said)


@lru_cache(maxsize=4)
def _tokenizer_of(path: str, content: str, said: str) -> str:
    return read_gguf(path, content, said).tokenizer


def _converted(path: str, said: str) -> dict[str, Tensor]:
    import transformers

    folder, name = os.path.split(path)
    try:
        with _silent(transformers):
            model, loading = transformers.AutoModelForCausalLM.from_pretrained(
                folder, gguf_file=name, dtype=torch.float32, output_loading_info=True, **LOCAL
            )
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name, **LOCAL)
    except Exception as error:  # the libraries raise many types
        reason = " ".join(str(error).split()).rstrip(".")
        raise ModelError(
            f"{said} cannot be read as a .gguf file by transformers: {type(error).__name__}: {reason}; copy the file "
            "again, or pass a directory of Hugging Face."
        ) from error
    if missing := sorted({*loading["missing_keys"]} - {*(model.all_tied_weights_keys or ())}):
        raise ModelError(f"{said} lacks {first_few(missing, LISTED, ', ')}; copy the file again, or pass another.")
    config = {key: value for key, value in model.config.to_dict().items() if key not in OF_FILE}
    parts = {CONFIG: json.dumps(config, sort_keys=True), TOKENIZER: tokenizer.backend_tokenizer.to_str()}
    texts = {key: torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) for key, text in parts.items()}
    named = {id(each): (key, each) for key, each in reversed(model.state_dict(keep_vars=True).items())}  # tied: once
    return texts | {f"{WEIGHT}{key}": each.detach().contiguous() for key, each in named.values()}


@contextmanager
def _silent(transformers: Any) -> Iterator[None]:
    """Show neither progress bars nor warnings of transformers."""
    logging = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):  # one progress bar does not ask this setting
            yield
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar() if bars else None
