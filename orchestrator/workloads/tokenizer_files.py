"""Files of a tokenizer, copied as a directory that transformers loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from orchestrator.planning.file_places import BESIDE_TOKENIZER, GGUF, TOKENIZER, TOKENIZER_SETTINGS
from orchestrator.workloads.networks.gguf_files import LOCAL
from pruning.graph.tracing import quiet


def copy_tokenizer(file: str, source: Path, folder: Path) -> None:
    """Copy the files of a tokenizer into a folder, if there are any.

    Args:
        file: the tokenizer of the data: a file of the package tokenizers, a .gguf file, or another word.
        source: directory or .gguf file of the model, whose tokenizer is taken if that of the data is no file.
        folder: the folder to write.
    """
    tokenizer = next((each for each in (Path(file), source / TOKENIZER, source) if each.is_file()), None)
    if tokenizer is None:
        return
    if tokenizer.suffix == GGUF:
        from transformers import AutoTokenizer

        with quiet():
            loaded = AutoTokenizer.from_pretrained(tokenizer.parent, gguf_file=tokenizer.name, **LOCAL)
        loaded.save_pretrained(folder)
        return
    shutil.copyfile(tokenizer, folder / TOKENIZER)
    if tokenizer.name == TOKENIZER:
        for name in BESIDE_TOKENIZER:
            if (tokenizer.parent / name).is_file():
                shutil.copyfile(tokenizer.parent / name, folder / name)
    if not (folder / TOKENIZER_SETTINGS).is_file():
        (folder / TOKENIZER_SETTINGS).write_text(
            json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}), encoding="utf-8"
        )
