"""Random small networks with operations in odd places: grids, masks, constants, recurrent layers, biases of heads."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pruning

Step = Callable[[Tensor], Tensor]


class Call(nn.Module):
    """Applies a function that reads the module's own tensors."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **tensors: Any) -> None:
        super().__init__()
        self.function = function
        for name, value in tensors.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def channelwise(width: int) -> dict[str, Callable[[], nn.Module]]:
    """Return operations on (batch, ..., width) that keep its shape."""

    def scale() -> nn.Parameter:
        return nn.Parameter(torch.randn(width))

    return {
        "relu": nn.ReLU,
        "silu": nn.SiLU,
        "norm": lambda: nn.LayerNorm(width),
        "type as": lambda: Call(lambda m, x: x * torch.arange(1, width + 1).type_as(x) / width),
        "to": lambda: Call(lambda m, x: x + torch.linspace(-1, 1, width).to(x)),
        "like": lambda: Call(lambda m, x: x * torch.full_like(x, 0.5) + torch.zeros_like(x)),
        "new": lambda: Call(lambda m, x: x * x.new_ones(1) + x.new_zeros(width)),
        "expand as": lambda: Call(lambda m, x: x * m.p.expand_as(x), p=scale()),
        "view as": lambda: Call(lambda m, x: (x.flatten(0, 1) * m.p).view_as(x), p=scale()),
        "chosen": lambda: Call(lambda m, x: torch.where(x > 0, x, 0.1 * x)),
        "filled": lambda: Call(lambda m, x: x + torch.empty_like(x).fill_(0.3)),
        "mask": lambda: Call(lambda m, x: x * (x > 0).type_as(x)),
        "buffer": lambda: Call(lambda m, x: x * m.p, p=nn.Buffer(torch.randn(width))),
        "halves": lambda: Call(lambda m, x: torch.cat([x.chunk(2, -1)[1], x.chunk(2, -1)[0].relu()], -1)),
        "positions": lambda: Call(lambda m, x: x + torch.arange(x.shape[1], dtype=x.dtype)[:, None]),
        "rows": lambda: Call(lambda m, x: (x.transpose(1, 2) @ torch.eye(4, dtype=x.dtype).flip(0)).transpose(1, 2)),
        "mean": lambda: Call(lambda m, x: x - x.mean(1, keepdim=True).expand_as(x)),
    }


class Attention(nn.Module):
    """Attention over 4 tokens with a bias for each head, of a random kind."""

    def __init__(self, draw: random.Random, width: int) -> None:
        super().__init__()
        self.heads, self.size = draw.choice((2, 3, 4)), draw.choice((2, 3))
        inner = self.heads * self.size
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=draw.random() < 0.5) for _ in range(3))
        self.o, self.kind, self.written = nn.Linear(inner, width), draw.randrange(6), draw.random() < 0.5
        self.bias, self.table = nn.Parameter(torch.randn(self.heads, 4, 4)), nn.Embedding(8, self.heads)
        self.slopes = nn.Buffer(torch.rand(self.heads, 1, 1))

    def mask(self, x: Tensor) -> Tensor | None:
        away = torch.arange(4)[:, None] - torch.arange(4)[None]
        return (
            None,
            self.bias,
            self.table(away + 3).permute(2, 0, 1)[None],
            -self.slopes * away.abs(),
            torch.zeros(1, self.heads, 4, 4, dtype=x.dtype),
            torch.where(away >= 0, self.bias, -1e9),
        )[self.kind]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).view(*x.shape[:2], -1, self.size).transpose(1, 2) for each in (self.q, self.k, self.v))
        mask = self.mask(x)
        if self.written:
            scores = q @ k.transpose(-2, -1) * 0.5
            y = (scores if mask is None else scores + mask).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        found: Tensor = x + self.o(y.transpose(1, 2).flatten(2))
        return found


class Recurrent(nn.Module):
    """A recurrent layer of a random kind."""

    def __init__(self, draw: random.Random, width: int, outputs: int) -> None:
        super().__init__()
        kind: Any = draw.choice((nn.LSTM, nn.GRU, nn.RNN))
        both = draw.random() < 0.4
        options = {"proj_size": 2} if kind is nn.LSTM and draw.random() < 0.3 else {}
        self.layer = kind(width, outputs, draw.choice((1, 2)), batch_first=True, bidirectional=both, **options)
        self.out = nn.Linear((options.get("proj_size", outputs)) * (2 if both else 1), outputs)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.layer(x)[0])
        return found


def network(seed: int) -> nn.Module:
    """Return a random classifier of sequences (4, 6) in 3 classes, in evaluation mode."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width = draw.choice((8, 12))
    steps: list[nn.Module] = [nn.Linear(6, width)]
    for _ in range(draw.randint(2, 4)):
        simple = channelwise(width)
        steps += [simple[draw.choice(list(simple))]() for _ in range(draw.randint(0, 2))]
        wide, kind = draw.choice((8, 10, 12)), draw.choice(("linear", "attention", "recurrent", "conv"))
        if kind == "attention":
            steps.append(Attention(draw, width))
            continue
        if kind == "conv":
            layer = nn.Conv1d(width, wide, 3, padding=1)
            steps.append(Call(lambda m, x: m.layer(x.transpose(1, 2)).transpose(1, 2), layer=layer))
        else:
            steps.append(Recurrent(draw, width, wide) if kind == "recurrent" else nn.Linear(width, wide))
        width = wide
    steps += [Call(lambda m, x: x.mean(1)), nn.Linear(width, 3)]
    return nn.Sequential(*steps).eval()


def empty(model: nn.Module, x: Tensor, seed: int) -> None:
    """Set random channels of random groups to 0, and random outputs of random weights."""
    draw = random.Random(seed)
    tensors = model.state_dict()
    for group in pruning.dependency_groups(model, x):
        gone = torch.tensor([draw.random() < 0.4 for _ in range(group.units)] + [False])
        for member in group.members:
            tensor = tensors[member.tensor]
            tensor[gone[member.channels].expand(tensor.shape)] = 0.0
    for name, tensor in tensors.items():
        if name.endswith("weight") and draw.random() < 0.3:
            tensor[torch.tensor([draw.random() < 0.2 for _ in range(len(tensor))])] = 0.0
