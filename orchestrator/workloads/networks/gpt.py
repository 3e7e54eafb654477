"""A small GPT: a decoder of tokens whose linear layers are pruned as those of any network are."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.errors import ModelError


class Gpt(nn.Module):
    """Tokens (batch, length) int64 -> logits (batch, length, vocabulary) of the token that follows each.

    Blocks of causal attention and a GELU layer four times as wide, each behind a layer normalisation and around a
    shortcut, as in GPT-2 (Radford et al. 2019), without biases in linear layers. The head shares nothing with the
    embedding: what is pruned of the one stays in the other.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(heads, width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weights anew from N(0, 0.02^2), what layers have drawn of themselves left aside."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # those that end a shortcut's branch, less: the sum of all keeps its spread
                ends_branch = name.endswith(("attention.out.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * len(self.blocks)) if ends_branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits; raise `ModelError` for more tokens than the network has positions for."""
        length, context = tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise ModelError(
                f"`model.context` (={context}) must be at least the length of a block of tokens, here {length}; pass "
                "null to take that of the data."
            )
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits


class _Block(nn.Module):
    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = _Attention(heads, width, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x)))))
        return out


class _Attention(nn.Module):
    """Causal self-attention; queries, keys and values are layers of their own, so that each is pruned by itself."""

    def __init__(self, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        chance = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=chance, is_causal=True)
        return F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout, self.training)


def gpt(
    input_shape: Sequence[int],
    classes: int,
    layers: int = 4,
    heads: int = 4,
    width: int = 128,
    context: int | None = None,
    dropout: float = 0.0,
) -> Gpt:
    """Return a GPT for blocks of tokens: 0.8 million parameters as it stands, with some hundred tokens.

    Args:
        input_shape: [length of a block].
        classes: number of different tokens.
        layers: number of blocks.
        heads: of each attention; they share `width` out evenly.
        width: features of a token.
        context: the most tokens that it can look back on; None is the length of a block.
        dropout: fraction of activations that training drops.

    Raises:
        ModelError: the data are no blocks of tokens, or longer than `context`, or `heads` do not divide `width`.
    """
    if len(input_shape) != 1:
        raise ModelError(
            f"`model.input_shape` (={list(input_shape)}) must be [length] of a block of tokens for gpt; choose "
            "data=text, or another model."
        )
    if context is not None and context < input_shape[0]:
        raise ModelError(
            f"`model.context` (={context}) must be at least the length of a block of tokens, here {input_shape[0]}; "
            "pass null to take that of the data."
        )
    if width % heads:
        raise ModelError(f"`model.heads` (={heads}) must divide `model.width` (={width}); pass 4 heads for 128.")
    return Gpt(classes, context or input_shape[0], layers, heads, width, dropout)
