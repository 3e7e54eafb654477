"""Random pruned networks with every kind of layer that sparse kernels compute, and inputs for them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from generated_networks import network as network_of_images
from torch import Tensor, nn

SPARSITIES = (0.0, 0.3, 0.7, 0.9, 0.99)
Case = tuple[nn.Module, Callable[[int], Any]]
"""A network, and: batch size -> inputs (a tensor, a tuple or a dict)."""


class Text(nn.Module):
    """Attention, a tied output layer, and a layer whose weight is stored transposed (GPT-2's Conv1D)."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.tokens, self.norm = nn.Embedding(23, width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.turned, self.bias = nn.Parameter(torch.randn(width, 2 * width) / 4), nn.Parameter(torch.randn(2 * width))
        self.down, self.tied = nn.Linear(2 * width, width), draw.random() < 0.5
        self.head = nn.Linear(width, 23)

    def forward(self, tokens: Tensor) -> Any:
        x = self.tokens(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        wide = torch.addmm(self.bias, x.flatten(0, 1), self.turned).view(*x.shape[:2], -1)
        again = torch.addmm(self.bias, F.gelu(x).flatten(0, 1), self.turned).view(*x.shape[:2], -1)
        x = self.norm(x + self.down(F.relu(wide) + again))
        return (F.linear(x, self.tokens.weight) if self.tied else self.head(x)), {"hidden": x}


class Signal(nn.Module):
    """One-dimensional convolutions, with groups and strides, and a layer that is called twice."""

    def __init__(self, channels: int, draw: random.Random) -> None:
        super().__init__()
        kernel, stride, groups = draw.choice([1, 3, 4]), draw.choice([1, 2, 3]), draw.choice([1, 2])
        self.first = nn.Conv1d(4, channels, kernel, stride, padding=kernel // 2, groups=groups)
        self.same = nn.Conv1d(channels, channels, 3, padding="same", dilation=draw.choice([1, 2]), bias=False)
        self.norm, self.clamp = nn.BatchNorm1d(channels, affine=draw.random() < 0.5), draw.choice([0.5, 6.0])

    def forward(self, x: Tensor, y: Tensor) -> Any:
        x = F.hardtanh(self.norm(self.first(x)), -self.clamp, self.clamp)
        x = F.relu6(self.same(x)) + self.same(x)
        return x.mean(2), y - x.amax((1, 2), keepdim=True)[:, 0]


class Images(nn.Module):
    """Two-dimensional convolutions of uneven kernels and strides, shortcuts of every order, and outputs used twice."""

    def __init__(self, channels: int, draw: random.Random) -> None:
        super().__init__()
        kernel = draw.choice([1, 2, 3, 5]), draw.choice([1, 3, 4])
        stride, dilation = (draw.choice([1, 2, 3]), draw.choice([1, 2])), (draw.choice([1, 2]), 1)
        self.first = nn.Conv2d(3, channels, kernel, stride, (draw.choice([0, 2]), 3), dilation)
        self.norm = nn.BatchNorm2d(channels)
        self.one = nn.Conv2d(channels, channels, 3, padding=1, groups=draw.choice([1, 2, channels]))
        self.two = nn.Conv2d(channels, channels, 1, bias=False)
        self.head = nn.Linear(channels, draw.choice([1, 7, 33]))
        self.kind = draw.randrange(6)

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.norm(self.first(x)), inplace=True)
        one, two = self.one(x), self.two(x)
        if self.kind == 0:
            x = F.relu(one + x)
        elif self.kind == 1:
            x = F.relu(x + two) + one
        elif self.kind == 2:
            x = (two + two).clamp(max=0.3) + one.mean((2, 3), keepdim=True)
        elif self.kind == 3:
            x = one.add_(two).relu_() * two
        elif self.kind == 4:
            x = torch.add(one, x, alpha=2).clamp(-0.4, -0.1) - two
        else:
            x = F.relu6(one + x.mean((2, 3), keepdim=True)) + torch.cat([two[:, :0], two], 1)
        return self.head(x.mean((2, 3)))


class Rows(nn.Module):
    """A multilayer perceptron with several inputs and outputs, over rows in any number of dimensions."""

    def __init__(self, width: int, draw: random.Random) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, 65), nn.Linear(65, width, bias=draw.random() < 0.5)
        self.norm, self.out = nn.BatchNorm1d(65), nn.Linear(width, 3)

    def forward(self, x: Tensor, more: list[Tensor]) -> Any:
        wide = F.relu(self.norm(self.one(x)))
        x = x + self.two(wide) * more[0]
        return [self.out(x), self.out(x.unsqueeze(1) + more[1])]


def case(number: int) -> Case:
    """Return a random network in evaluation mode, pruned, and a function that makes its inputs."""
    draw = random.Random(number)
    torch.manual_seed(number)
    kind, width = number % 5, draw.choice([8, 12, 18])
    model: nn.Module
    if kind == 0:
        length = draw.choice([1, 5, 9])
        model = Text(width, draw)

        def inputs(batch: int) -> Any:
            return torch.randint(0, 23, (batch, length))

    elif kind == 1:
        length = draw.choice([7, 16, 33])
        model = Signal(width, draw)

        def inputs(batch: int) -> Any:
            return {"y": torch.randn(batch, 5), "x": torch.randn(batch, 4, length)}

    elif kind == 2:
        size = draw.choice([9, 12]), draw.choice([9, 17])
        model = Images(width, draw)

        def inputs(batch: int) -> Any:
            return torch.randn(batch, 3, *size)

    elif kind == 3:
        model = Rows(width, draw)

        def inputs(batch: int) -> Any:
            return torch.randn(batch, width), [torch.rand(batch, 1), torch.randn(batch, 2, width)]

    else:
        model = network_of_images(number).float()

        def inputs(batch: int) -> Any:
            return torch.randn(batch, 3, 8, 8)

    return pruned(model.eval(), draw), inputs


def pruned(model: nn.Module, draw: random.Random) -> nn.Module:
    """Zero random weights, and some whole rows; draw statistics of normalisations."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d) and module.running_mean is not None:
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)  # type: ignore[union-attr]
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter[torch.rand_like(parameter) < draw.choice(SPARSITIES)] = 0
                if draw.random() < 0.3:
                    parameter[torch.rand(len(parameter)) < 0.3] = 0
    return model
