"""Random networks with empty channels: convolutions of every kind, residuals, concatenations and gates."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

ACTIVATIONS = (nn.ReLU, nn.GELU, nn.SiLU, nn.Hardswish, nn.Identity)


class Residual(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x)


class Concat(nn.Module):
    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class Gate(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.expand(self.reduce(x.mean((2, 3), keepdim=True)).relu()).sigmoid()


class Halves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        return torch.cat([other, one.relu()], 1)


def layer(draw: random.Random, inputs: int, outputs: int, *, keeps_size: bool = True) -> nn.Module:
    kernel = draw.choice((1, 3))
    padding = kernel // 2 if keeps_size else 0
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, kernel, padding=padding, bias=draw.random() < 0.5)]
    if draw.random() < 0.6:
        layers.append(nn.BatchNorm2d(outputs))
    return nn.Sequential(*layers, draw.choice(ACTIVATIONS)())


def block(draw: random.Random, channels: int) -> tuple[nn.Module, int]:
    """Return a random block that takes `channels`, and its number of output channels."""
    wide = draw.choice((8, 12, 16))
    kinds: dict[str, Callable[[], tuple[nn.Module, int]]] = {
        "layer": lambda: (layer(draw, channels, wide, keeps_size=draw.random() < 0.7), wide),
        "residual": lambda: (
            Residual(nn.Sequential(layer(draw, channels, wide), layer(draw, wide, channels))),
            channels,
        ),
        "concat": lambda: (Concat(layer(draw, channels, 8), layer(draw, channels, 4), nn.Identity()), channels + 12),
        "grouped": lambda: (nn.Conv2d(channels, channels, 3, padding=1, groups=2), channels),
        "depthwise": lambda: (nn.Conv2d(channels, channels, 3, padding=1, groups=channels), channels),
        "multiplied": lambda: (nn.Conv2d(channels, 2 * channels, 1, groups=channels), 2 * channels),
        "pool": lambda: (draw.choice((nn.MaxPool2d, nn.AvgPool2d))(3, 1, 1), channels),
        "shuffle": lambda: (nn.PixelShuffle(2), channels // 4) if channels % 8 == 0 else (nn.ReLU(), channels),
        "transposed": lambda: (nn.ConvTranspose2d(channels, wide, 2, 2), wide),
        "gate": lambda: (Gate(channels), channels),
        "halves": lambda: (Halves(), channels),
        "norm": lambda: (nn.GroupNorm(2, channels), channels),
    }
    return kinds[draw.choice(list(kinds))]()


def network(seed: int, *, emptied: bool = True) -> nn.Module:
    """Return a random classifier of images (3, 8, 8) in 5 classes, float64, in evaluation mode.

    If `emptied`, random channels are set to zero.
    """
    draw = random.Random(seed)
    torch.manual_seed(seed)
    blocks: list[nn.Module] = [layer(draw, 3, 8)]
    channels = 8
    for _ in range(draw.randint(2, 4)):
        made, channels = block(draw, channels)
        blocks.append(made)
        if channels > 32:
            blocks.append(nn.Conv2d(channels, 16, 1))
            channels = 16
    size = draw.choice((1, 2))
    head = [
        nn.AdaptiveAvgPool2d(size),
        nn.Flatten(),
        nn.Linear(channels * size * size, 12),
        nn.ReLU(),
        nn.Linear(12, 5),
    ]
    model = nn.Sequential(*blocks, *head).double().eval()
    empty(model, draw, emptied)
    return model


def empty(model: nn.Module, draw: random.Random, emptied: bool) -> None:
    """Draw statistics of BatchNorm; if `emptied`, set random outputs of layers to zero, some with their biases."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean.normal_(0, 0.3)
                module.running_var.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.3)
                clean = torch.tensor([draw.random() < 0.3 * emptied for _ in range(module.num_features)])
                module.bias[clean] = 0.0
                module.weight[clean] = 0.0
            elif isinstance(module, nn.Conv2d | nn.Linear | nn.ConvTranspose2d):
                outputs = module.weight.transpose(0, 1) if isinstance(module, nn.ConvTranspose2d) else module.weight
                dead = torch.tensor([draw.random() < 0.4 * emptied for _ in range(len(outputs))])
                outputs[dead] = 0.0
                if module.bias is not None and draw.random() < 0.6:
                    module.bias[dead] = 0.0
