"""Program that loads an exported directory with stock transformers and saves its outputs.

    python -P stock_loading.py OURS DIRECTORY QUESTIONS ANSWERS THREADS

A fresh process runs this file by its path, so the file imports nothing of this project.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PROMPT, GENERATED = "prompt", "generated"
"""Names of the tokens to continue, and of these tokens with their continuation."""
TEXT, TOKENS = "text", "tokens"
"""Names of the bytes of a text, and of its tokens."""
NEW_TOKENS = 16
"""Maximum number of tokens in a continuation."""
PACKAGES = ("orchestrator", "pruning", "hydra_plugins")
"""Packages of this project, which the process must not be able to import."""


def hide(root: str) -> None:
    """Make this project impossible to import: take its directory from the path, and block its packages' names."""
    own = [place for place in sys.path if Path(place or ".").resolve() == Path(root)]
    sys.path[:] = [place for place in sys.path if place not in own or Path(place, "transformers").is_dir()]
    sys.modules.update(dict.fromkeys(PACKAGES))  # type: ignore[arg-type]  # None stops an import of the name


def answers(network: Any, questions: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the logits of each example, and the greedy continuation of the prompt.

    Args:
        network: a network of transformers in evaluation mode.
        questions: "N/NAME" -> argument NAME of example N, and `PROMPT` -> tokens (1, length), if there is one.
    """
    examples: dict[str, dict[str, Tensor]] = {}
    for name, tensor in questions.items():
        number, _, argument = name.partition("/")
        if argument:
            examples.setdefault(number, {})[argument] = tensor
    with torch.no_grad():
        found = {number: network(**example).logits for number, example in examples.items()}
        if PROMPT in questions:
            prompt = questions[PROMPT]
            greedy = {"do_sample": False, "num_beams": 1, "max_new_tokens": NEW_TOKENS}
            found[GENERATED] = network.generate(prompt, attention_mask=torch.ones_like(prompt), **greedy)
    return {name: tensor.contiguous() for name, tensor in found.items()}


def main(root: str, directory: str, questions: str, into: str, threads: str) -> None:
    """Load a directory without this project, and write the answers to a file of questions."""
    hide(root)
    import transformers

    torch.set_num_threads(int(threads))
    config = transformers.AutoConfig.from_pretrained(directory, local_files_only=True)
    kind = getattr(transformers, config.architectures[0])
    network = kind.from_pretrained(directory, local_files_only=True).eval()
    asked = load_file(questions)
    found = answers(network, asked)
    if TEXT in asked:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        text = bytes(asked[TEXT].tolist()).decode()
        found[TOKENS] = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    save_file(found, into)


if __name__ == "__main__":
    main(*sys.argv[1:])
