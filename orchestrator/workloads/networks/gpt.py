"""Small GPT: a decoder of tokens whose linear layers are pruned as in any other network."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.errors import ModelError


class Gpt(nn.Module):
    """Decoder: tokens (batch, length) int64 -> logits (batch, length, vocabulary) of the next token at each position.

    Each block has causal attention and a GELU layer four times as wide; both follow a layer normalisation and are added
    to a shortcut, as in GPT-2 (Radford et al. 2019). Linear layers have no biases. Head and embedding share no weights,
    so pruning one leaves the other unchanged.
    """

    def __init__(self, vocabulary: int, context: int, layers: int, heads: int, width: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_GptBlock(heads, width, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw all weight matrices from N(0, 0.02^2), with a smaller deviation at the end of each branch."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:  # smaller at the end of a branch, so that the sum of branches keeps its spread
                ends_branch = name.endswith(("attention.out.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / sqrt(2 * len(self.blocks)) if ends_branch else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits; raise `ModelError` for more tokens than the network has positions."""
        length, context = tokens.shape[1], self.positions.num_embeddings
        if length > context:
            raise ModelError(
                f"`model.context` (={context}) must be at least {length}, the length of a block of tokens; pass "
                "null to use the length in the data."
            )
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        logits: Tensor = self.head(self.norm(self.blocks(self.dropout(x))))
        return logits


class _GptBlock(nn.Module):
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
    """Causal self-attention; queries, keys and values are separate layers, so that each is pruned separately."""

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
    """Return a GPT for blocks of tokens: 0.8 million parameters with the defaults and about a hundred tokens.

    Args:
        input_shape: [length of a block].
        classes: number of different tokens.
        layers: number of blocks.
        heads: number of attention heads per block; `width` is divided evenly among them.
        width: features of a token.
        context: number of positions, the most tokens that the network takes; None takes the length of a block.
        dropout: fraction of activations that training drops.

    Raises:
        ModelError: the data are not blocks of tokens, or blocks are longer than `context`, or `heads` do not divide
            `width`.
    """
    if len(input_shape) != 1:
        raise ModelError(
            f"`model.input_shape` (={list(input_shape)}) must be [length of a block of tokens] for gpt; choose "
            "data=text, or another model."
        )
    if context is not None and context < input_shape[0]:
        raise ModelError(
            f"`model.context` (={context}) must be at least {input_shape[0]}, the length of a block of tokens; "
            "pass null to use the length in the data."
        )
    if width % heads:
        raise ModelError(f"`model.heads` (={heads}) must divide `model.width` (={width}); pass 4 heads for width 128.")
    return Gpt(classes, context or input_shape[0], layers, heads, width, dropout)
