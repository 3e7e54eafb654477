"""Masks and models for the tests in this folder."""

import torch
from torch import nn

from pruning import MaskSet


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Sequential(nn.Linear(6, 5), nn.ReLU()), nn.LSTM(5, 3))


def some_masks(density=0.5):
    generator = torch.Generator().manual_seed(1)
    shapes = {"0.weight": (4, 1, 3, 3), "1.0.weight": (5, 6), "1.0.bias": (5,), "2.weight_hh_l0": (12, 3)}
    return MaskSet({name: torch.rand(shape, generator=generator) < density for name, shape in shapes.items()})
