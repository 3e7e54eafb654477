"""Small classifiers from the pruning literature: an MLP, a CNN, LeNets, ResNet-20."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import Self

import torch.nn.functional as F
from torch import Tensor, nn

from orchestrator.core.errors import ModelError


def mlp(
    input_shape: Sequence[int],
    classes: int,
    hidden: Sequence[int] = (256, 128),
    dropout: float = 0.0,
    batch_norm: bool = False,
    bias: bool = True,
) -> nn.Sequential:
    """Return linear layers fc1, fc2, ... of widths `hidden` with ReLU (and dropout) in between; the input is flattened.

    With `batch_norm`, a batch normalisation precedes each ReLU, and the layers before it have no biases.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    widths = (prod(input_shape), *hidden, classes)
    for index, (fan_in, fan_out) in enumerate(pairwise(widths), start=1):
        inner = index < len(widths) - 1
        layers[f"fc{index}"] = nn.Linear(fan_in, fan_out, bias=bias and not (batch_norm and inner))
        if inner:
            if batch_norm:
                layers[f"bn{index}"] = nn.BatchNorm1d(fan_out)
            layers[f"relu{index}"] = nn.ReLU()
            if dropout:
                layers[f"dropout{index}"] = nn.Dropout(dropout)
    return nn.Sequential(layers)


def cnn(
    input_shape: Sequence[int],
    classes: int,
    channels: Sequence[int] = (32, 64),
    hidden: Sequence[int] = (),
    batch_norm: bool = True,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Return blocks conv1, conv2, ... (3x3, batch norm, ReLU, 2x2 max pooling), then linear layers fc1, fc2, ..."""
    fan_in, height, width = _image("cnn", input_shape, least=2 ** len(channels))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for index, fan_out in enumerate(channels, start=1):
        layers[f"conv{index}"] = nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=not batch_norm)
        if batch_norm:
            layers[f"bn{index}"] = nn.BatchNorm2d(fan_out)
        layers[f"relu{index}"] = nn.ReLU()
        layers[f"pool{index}"] = nn.MaxPool2d(2)
        fan_in, height, width = fan_out, height // 2, width // 2
    layers["classifier"] = mlp((fan_in, height, width), classes, hidden, dropout)
    return nn.Sequential(layers)


def lenet_300_100(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Return LeNet-300-100 (LeCun et al. 1998) with ReLU and Gaussian Glorot weights, as in arXiv 1803.03635."""
    return _Glorot.of(OrderedDict(mlp(input_shape, classes, hidden=(300, 100)).named_children()))


def lenet5(input_shape: Sequence[int], classes: int) -> nn.Sequential:
    """Return LeNet-5 in the sizes of Caffe: 20 and 50 filters of 5x5, 2x2 max pooling, 500 units.

    Every layer but the last has a ReLU, as in the pruning literature. Weights are Gaussian Glorot; 430,500 weights at
    1x28x28.
    """
    channels, height, width = _image("lenet5", input_shape, least=16)
    side = [((extent - 4) // 2 - 4) // 2 for extent in (height, width)]
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(channels, 20, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(20, 50, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(50 * side[0] * side[1], 500),
        relu3=nn.ReLU(),
        fc2=nn.Linear(500, classes),
    )
    return _Glorot.of(layers)


class _Glorot(nn.Sequential):
    """Layers with weights from N(0, 2 / (fan_in + fan_out)) and zero biases (Glorot & Bengio 2010)."""

    @classmethod
    def of(cls, layers: OrderedDict[str, nn.Module]) -> Self:
        (model := cls(layers)).reset_parameters()
        return model

    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.xavier_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


class _ByFanOut(_Glorot):
    def reset_parameters(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


class _Block(nn.Module):
    """Two 3x3 convolutions with a shortcut; if the shape changes, the shortcut is subsampled and zero-padded."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(fan_out)
        self.stride = stride
        self.extra = fan_out - fan_in

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        shortcut = x[:, :, :: self.stride, :: self.stride]
        before = self.extra // 2
        return F.relu(out + F.pad(shortcut, (0, 0, 0, 0, before, self.extra - before)))


def resnet20(input_shape: Sequence[int], classes: int, width: int = 16) -> nn.Sequential:
    """Return ResNet-20 for small images (He et al. 2016, arXiv 1512.03385, section 4.2) with shortcuts of option A.

    Three stages of three blocks with `width`, 2 `width` and 4 `width` channels; 0.27 million parameters at 3x32x32 and
    10 classes. Convolutions are initialised from N(0, 2 / fan_out).
    """
    channels, *_ = _image("resnet20", input_shape, least=4)
    layers = OrderedDict[str, nn.Module](
        conv=nn.Conv2d(channels, width, 3, padding=1, bias=False), bn=nn.BatchNorm2d(width), relu=nn.ReLU()
    )
    fan_in = width
    for stage, fan_out in enumerate((width, 2 * width, 4 * width), start=1):
        blocks = [_Block(fan_in, fan_out, stride=2 if stage > 1 else 1), *(_Block(fan_out, fan_out, 1) for _ in (2, 3))]
        fan_in = fan_out
        layers[f"stage{stage}"] = nn.Sequential(*blocks)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "fc": nn.Linear(fan_in, classes)}
    return _ByFanOut.of(layers)


def _image(name: str, shape: Sequence[int], least: int) -> tuple[int, int, int]:
    """Return channels, height and width; raise `ModelError` for a shape without at least `least` pixels per side."""
    if len(shape) != 3 or min(shape[1:]) < least:
        raise ModelError(
            f"`model.input_shape` (={list(shape)}) must be [channels, height, width] with at least {least} pixels per "
            f"side for {name}; choose another model, such as mlp, or larger images."
        )
    channels, height, width = shape
    return channels, height, width
