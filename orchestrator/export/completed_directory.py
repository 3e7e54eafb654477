"""Complete an exported directory of transformers: tokenizer, settings of generation, check in a fresh process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import orchestrator
from orchestrator.deploy.checked_writing import CODECS
from orchestrator.deploy.formats.format import ExportError, call_values, cut, difference, input_names
from orchestrator.deploy.formats.huggingface_format import GENERATING, NAME, stock_network
from orchestrator.export import stock_loading
from orchestrator.export.stock_loading import GENERATED, NEW_TOKENS, PROMPT, TEXT, TOKENS, answers
from orchestrator.export.stored_network import StoredNetwork
from orchestrator.planning.file_places import GENERATION, TOKENIZER
from orchestrator.workloads.data_sets.text import ByteCodec, Characters
from orchestrator.workloads.tokenizer_files import copy_tokenizer
from pruning.graph.tracing import Example, quiet

NOWHERE = os.devnull
"""Stands for the directory of a model without one."""
EXAMPLES, LONGEST = 2, 32
"""Examples whose outputs the fresh process computes, and the maximum number of tokens in its prompt."""
SENTENCE = "In the beginning, it's 3 o'clock: tokens of plain text, and some of other letters (été)."


def complete(kept: StoredNetwork, folder: Path) -> None:
    """Add the tokenizer and the settings of generation to a directory, and check it in a fresh process.

    Raises:
        ExportError: stock transformers cannot load the directory, or computes or generates something else
    """
    places = {part: kept.spec.location.get(part, {}) for part in ("model", "data")}
    source = Path(places["model"].get("path") or NOWHERE)
    if (source / GENERATION).is_file():
        shutil.copyfile(source / GENERATION, folder / GENERATION)
    if not isinstance(kept.data.codec, Characters | ByteCodec):  # the model's tokenizer has other tokens than these
        copy_tokenizer(str(places["data"].get("tokenizer") or ""), source, folder)
    hold_in_fresh_process(kept, folder)


def hold_in_fresh_process(kept: StoredNetwork, folder: Path) -> None:
    """Check that stock transformers loads a directory, computes equal outputs, and generates equal tokens.

    The process cannot import this project. It computes the logits of some examples, continues a prompt greedily if the
    network generates, and reads a text if there is a tokenizer.

    Raises:
        ExportError: an answer differs from the masked network's, or the process fails
    """
    network, inputs = stock_network(kept.model), kept.inputs
    asked = questions(network, [cut(inputs[0], EXAMPLES), inputs[-1]])
    tokens = _tokens(folder)
    if tokens is not None:
        asked[TEXT] = torch.tensor(list(SENTENCE.encode()))
    found = _answers(folder, asked)
    expected = _expected(network, folder, asked)
    tolerance = CODECS[NAME].row.tolerance
    worst = max(difference(found[name], logits) for name, logits in expected.items() if name != GENERATED)
    if not worst <= tolerance:
        raise ExportError(
            f"stock transformers computes other outputs than the masked network (they differ by {worst:.2g} of the "
            f"largest, and must differ by at most {tolerance:g}); take another format."
        )
    if PROMPT in asked and not torch.equal(found[GENERATED], expected[GENERATED]):
        raise ExportError("stock transformers generates other tokens than the masked network; take another format.")
    if tokens is not None and found[TOKENS].tolist() != tokens:
        raise ExportError(
            f"stock transformers reads a text as other tokens than {TOKENIZER}; make the tokenizer again, with "
            "save_pretrained of transformers."
        )


def questions(network: Any, examples: list[Example]) -> dict[str, Tensor]:
    """Return the examples and the prompt, as `answers` takes them."""
    found = {
        f"{number}/{name}": value.clone(memory_format=torch.contiguous_format)  # safetensors refuses shared memory
        for number, example in enumerate(examples)
        for name, value in zip(input_names(network, example), call_values(example), strict=True)
    }
    tokens = found.get("0/input_ids")
    if tokens is not None and network.can_generate() and not network.config.is_encoder_decoder:
        context = getattr(network.config.get_text_config(), "max_position_embeddings", None) or LONGEST + NEW_TOKENS
        found[PROMPT] = tokens[:1, : max(1, min(LONGEST, context - NEW_TOKENS))].clone()
    return found


def _expected(network: Any, folder: Path, asked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if PROMPT in asked and (folder / GENERATION).is_file():
        from transformers import GenerationConfig

        network.generation_config = GenerationConfig.from_pretrained(folder)
    with quiet():
        return answers(network, asked)


def _tokens(folder: Path) -> list[int] | None:
    """Return the tokens of `SENTENCE`; None without a tokenizer."""
    if not (folder / TOKENIZER).is_file():
        return None
    from tokenizers import Tokenizer

    found: list[int] = Tokenizer.from_file(str(folder / TOKENIZER)).encode(SENTENCE, add_special_tokens=False).ids
    return found


def _answers(folder: Path, asked: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the answers of a fresh process."""
    root = str(Path(orchestrator.__file__).resolve().parents[1])
    with tempfile.TemporaryDirectory() as held:
        files = [str(Path(held, name)) for name in ("questions", "answers")]
        save_file(asked, files[0])
        program = [sys.executable, "-P", str(stock_loading.__file__), root, str(folder.resolve()), *files]
        done = subprocess.run(
            [*program, str(torch.get_num_threads())],
            cwd=held,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            said = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:200]
            raise ExportError(f"stock transformers cannot load the written directory ({said}); take another format.")
        return load_file(files[1])


def generation_code(network: nn.Module, folder: Path) -> str:
    """Return the part of a model card on generating text; empty without a tokenizer, or if nothing is generated."""
    found = stock_network(network)
    if not found.can_generate() or not (folder / TOKENIZER).is_file():
        return ""
    code = GENERATING.format(kind=type(found).__name__)
    return f"\n### Generating text\n\n```python generation\n{code}```\n"
