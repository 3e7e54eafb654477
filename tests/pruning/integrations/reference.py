"""Reference for the adaptors: a hand-written training loop over the same batches, with a mask keeper."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import pruning
from pruning import MaskKeeper, MaskSet
from pruning.dynamics import Dynamics

BATCH, ACCUMULATE, EPOCHS, CLIP = 2, 2, 2, 0.05


class Drifting(torch.optim.SGD):
    """An optimizer that moves every entry, whatever its gradient, like momentum from training before the masks."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.add_(0.01)
        return loss


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1),
    "Drifting": partial(Drifting, lr=0.1),
}


class Examples(Dataset[dict[str, Tensor]]):
    """Twelve examples of six features and three classes."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(12, 6, generator=generator)
        self.labels = torch.randint(3, (12,), generator=generator)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": self.inputs[index], "labels": self.labels[index]}


class Network(nn.Module):
    """A network of two layers that returns its loss, like models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(inputs), labels)}


def masks() -> MaskSet:
    generator = torch.Generator().manual_seed(2)
    return MaskSet(
        {f"layers.{i}.weight": torch.rand(s, generator=generator) < 0.5 for i, s in ((0, (5, 6)), (2, (3, 5)))}
    )


def train(model: Network, optimizer: torch.optim.Optimizer, epochs: int = EPOCHS) -> None:
    """Train with gradient accumulation over two batches and clipping."""
    examples = Examples()
    for _ in range(epochs):
        for index, first in enumerate(range(0, len(examples), BATCH)):
            batch = slice(first, first + BATCH)
            (model(examples.inputs[batch], examples.labels[batch])["loss"] / ACCUMULATE).backward()
            if (index + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                optimizer.zero_grad()


def trained_by_hand(make_optimizer: Callable[..., torch.optim.Optimizer], epochs: int = EPOCHS) -> dict[str, Tensor]:
    """Return the weights after training with gradient accumulation over two batches and clipping."""
    model = Network()
    optimizer = make_optimizer(model.parameters())
    keeper = MaskKeeper(model, masks())
    keeper.attach(optimizer)
    train(model, optimizer, epochs)
    keeper.release()
    return model.state_dict()


LENGTH = EPOCHS * 3
"""Steps of the whole training."""
DYNAMICS: dict[str, Callable[[], Dynamics]] = {
    "rigl": partial(pruning.dynamics.rigl, every=2, until=1.0),
    "set": partial(pruning.dynamics.set, every=2, fraction=0.5),
    "gradual": partial(pruning.dynamics.gradual, 0.8, every=1, until=1.0),
    "movement": partial(pruning.dynamics.movement, 0.8, every=1, until=1.0),
    "soft_movement": partial(pruning.dynamics.soft_movement, threshold=0.499, rate=1.0),
}


def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def changed_by_hand(
    make_optimizer: Callable[..., torch.optim.Optimizer], dynamics: Dynamics
) -> tuple[dict[str, Tensor], MaskSet]:
    """Return weights and masks after training as `trained_by_hand` does, with masks that change."""
    model = Network()
    optimizer = make_optimizer(model.parameters())
    dynamics.attach(model, masks(), optimizer, length=LENGTH, generator=drawn())
    train(model, optimizer)
    dynamics.release()
    assert dynamics.masks != masks()
    return model.state_dict(), dynamics.masks


def is_pruned(model: nn.Module) -> bool:
    """Return whether all entries that `masks` prune are exactly 0, and all other entries are not."""
    state = model.state_dict()
    return all(not state[name][~mask].any() and state[name][mask].all() for name, mask in masks().items())


def same(state: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in state.items())
