"""A tiny data set and network for each task, as users bring their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def regression_data() -> dict[str, Any]:
    """Return sums of four numbers."""
    parts = {name: _drawn(60, 4, seed=seed) for seed, name in enumerate(("train", "val", "test"))}
    return {name: (inputs, inputs.sum(1)) for name, inputs in parts.items()}


def classification_data() -> dict[str, Any]:
    """Return signs, and the same under noise as a further test set."""
    parts = {name: _drawn(60, 4, seed=seed) for seed, name in enumerate(("train", "val", "test"))}
    pairs: dict[str, Any] = {name: (inputs, (inputs.sum(1) > 0).long()) for name, inputs in parts.items()}
    inputs, labels = pairs["test"]
    return {**pairs, "tests": {"corrupted": (inputs + 3 * _drawn(60, 4, seed=9), labels)}}


class Sentences(Dataset[dict[str, Tensor]]):
    """Tokens that count up modulo 5, as dicts."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": (torch.arange(6) + index) % 5}


def language_modelling_data() -> dict[str, Any]:
    """Return sentences."""
    return {"train": Sentences(40), "val": Sentences(10), "test": Sentences(15), "classes": 5}


def segmentation_data() -> dict[str, Any]:
    """Return pixels that are above 0 or not, with a border that counts for nothing."""

    def part(seed: int) -> tuple[Tensor, Tensor]:
        images = _drawn(20, 1, 6, 6, seed=seed)
        labels = (images[:, 0] > 0).long()
        labels[:, 0] = 255
        return images, labels

    return {"train": part(0), "val": part(1), "test": part(2), "classes": 2}


def linear(classes: int | None = None) -> nn.Module:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, classes or 1))


def normed(classes: int | None = None) -> nn.Module:
    """Return a network of two layers with all that makes a training hard to repeat: buffers and dropout."""
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, classes or 2))


class Bigram(nn.Module):
    """The next token from the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 8), nn.Linear(8, 5)

    def forward(self, input_ids: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(self.embedding(input_ids))}


class Branching(nn.Module):
    """A layer that cannot be traced: which way it is taken is for the data to say."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        outputs: Tensor = self.layer(numbers if numbers.sum() > 0 else -numbers)
        return outputs


class Unreached(nn.Module):
    """A layer beside one that no output needs."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.layer, self.idle = nn.Linear(4, classes), nn.Linear(4, 4)

    def forward(self, numbers: Tensor) -> Tensor:
        outputs: Tensor = self.layer(numbers)
        return outputs


def unreached(classes: int | None = None) -> nn.Module:
    """Return a network with parameters that its loss does not depend on."""
    return Unreached(classes or 2)


def pixels() -> nn.Module:
    """Return a network of two convolutions."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
