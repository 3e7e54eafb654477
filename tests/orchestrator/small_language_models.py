"""A tiny language model as a .gguf file, with its configuration and tokenizer, and a text for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

LETTERS = [chr(code) for code in range(33, 127)]
WIDTH, INNER, HEADS, BLOCKS = 16, 32, 2, 3


def write_gguf(path: Path, *, without: Sequence[str] = (), seed: int = 0, tokens: int = 100) -> Path:
    """Write a Llama of `BLOCKS` blocks with random weights, which ties its head to its embedding.

    Args:
        path: the file.
        without: names of tensors to leave out.
        seed: seed of the weights.
        tokens: size of the vocabulary.
    """
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(BLOCKS)
    writer.add_context_length(64)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    words = ["<|endoftext|>", "Ġ", "Ċ", "ab", *LETTERS]
    writer.add_token_list([*words, *(f"<{number}>" for number in range(tokens - len(words)))])
    writer.add_token_types([3] + [1] * (tokens - 1))
    writer.add_token_merges(["a b"])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_unk_token_id):
        add(0)
    draws = np.random.default_rng(seed)
    shapes = {"token_embd": (tokens, WIDTH), "output_norm": (WIDTH,)}
    square, wide, tall = (WIDTH, WIDTH), (INNER, WIDTH), (WIDTH, INNER)
    layers = {"attn_norm": (WIDTH,), "ffn_norm": (WIDTH,), "ffn_gate": wide, "ffn_up": wide, "ffn_down": tall}
    layers |= {f"attn_{name}": square for name in ("q", "k", "v", "output")}
    for block in range(BLOCKS):
        shapes |= {f"blk.{block}.{name}": shape for name, shape in layers.items()}
    for name, shape in shapes.items():
        if name not in without:
            values = draws.standard_normal(shape) * 0.1 + ("norm" in name)
            writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_text(path: Path, length: int = 6000) -> Path:
    """Write random words of the tokens of `write_gguf`."""
    path.write_text("".join(random.Random(0).choices("abcdefgh ab \n", k=length)))
    return path
