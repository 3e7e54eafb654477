"""Digits, a network and its training, as a careful user of PyTorch writes them, for the peers' trials.

Split, network, optimizer, steps and evaluations are the same as with `model=mlp data=digits`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

Split = tuple[Tensor, Tensor]
Report = Callable[[dict[str, float], int], object]
"""Callback that gets metrics and the step."""


def load_splits() -> tuple[Split, Split, Split]:
    """Return scikit-learn's digits: a fifth for the test split, and a tenth of the rest for validation."""
    pixels, labels = load_digits(return_X_y=True)
    images = (torch.tensor(pixels, dtype=torch.float32) / 16 - 0.3053) / 0.3760
    classes = torch.tensor(labels).long()
    test, rest = _cut(torch.arange(len(classes)), 0.2)
    val, train = _cut(rest, 0.1)
    return (images[train], classes[train]), (images[val], classes[val]), (images[test], classes[test])


def mlp() -> nn.Sequential:
    """Return an MLP with two hidden layers and ReLU."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


def fit(
    model: nn.Module, train: Split, val: Split, steps: int, eval_every: int, report: Report, offset: int = 0
) -> None:
    """Train `model` for a number of steps, and load its best weights on the validation split."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    best, state, losses = -1.0, model.state_dict(), []
    for step, (inputs, labels) in zip(range(1, steps + 1), batches(train), strict=False):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(inputs), labels)
        torch.autograd.backward(loss)
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
        if step % eval_every == 0 or step == steps:
            metrics = {"train/loss": torch.stack(losses).mean().item(), **evaluate(model, val, "val")}
            report({f"curve/{name}": value for name, value in metrics.items()}, offset + step)
            losses.clear()
            if metrics["val/accuracy"] > best:
                best, state = metrics["val/accuracy"], copy.deepcopy(model.state_dict())
    model.load_state_dict(state)


@torch.no_grad()
def evaluate(model: nn.Module, split: Split, name: str) -> dict[str, float]:
    """Return loss and accuracy of `model` on a split."""
    outputs = model(split[0])
    hits = (outputs.argmax(1) == split[1]).float()
    return {f"{name}/loss": F.cross_entropy(outputs, split[1]).item(), f"{name}/accuracy": hits.mean().item()}


def batches(split: Split, size: int = 64) -> Iterator[Split]:
    """Yield shuffled batches for ever."""
    while True:
        for chosen in torch.split(torch.randperm(len(split[1])), size):
            yield split[0][chosen], split[1][chosen]


def _cut(rows: Tensor, fraction: float) -> tuple[Tensor, Tensor]:
    """Return a number of rows, drawn at random, and the other rows."""
    order = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
    size = round(fraction * len(rows))
    return order[:size].sort().values, order[size:].sort().values
