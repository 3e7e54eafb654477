"""SET's published experiment on Fashion-MNIST as its authors' code has it: data, network, loss and optimizer.

Source: Tutorial-ECMLPKDD-2019-Scalable-Deep-Learning/set_mlp.py of the authors' repository on GitHub,
dcmocanu/sparse-evolutionary-artificial-neural-networks (arXiv 1707.04780). The preset `+sweep=reproduce/set_fashion`
names these classes and functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from orchestrator.workloads.data_sets.named import fashion_mnist

TRAINING, VALIDATION, TEST = 2000, 1000, 1000


def data(root: str) -> dict[str, Any]:
    """Return the authors' 2,000 training and 1,000 test images, with pixels from 0 to 1.

    The validation split, which the authors do not have, is the next 1,000 training images in their order.

    Args:
        root: directory with `fashion-mnist/`.
    """
    splits = fashion_mnist(root, mean=(0.0,), std=(1.0,))
    drawn = np.random.RandomState(0)
    orders = {}
    for name in ("train", "test"):
        order = np.arange(len(splits[name]))
        drawn.shuffle(order)
        orders[name] = torch.from_numpy(order)
    parts = {
        "train": splits["train"].take(orders["train"][:TRAINING]),
        "val": splits["train"].take(orders["train"][TRAINING : TRAINING + VALIDATION]),
        "test": splits["test"].take(orders["test"][:TEST]),
    }
    return {**parts, "classes": 10}


class Network(nn.Module):
    """Linear layers fc1, fc2, ... with ReLU and the authors' dropout, which returns the outputs before the sigmoid.

    Weights are drawn from N(0, 0.1^2); biases begin at 0. Dropout sets outputs to 0 in training without rescaling the
    others, and gradients pass through as if nothing had been set to 0. In testing all layers but the first multiply
    their outputs, with the bias, by 1 - dropout.

    Args:
        input_shape: shape of an example.
        classes: number of outputs.
        hidden: widths of the hidden layers.
        dropout: fraction of a hidden layer's outputs that training sets to 0.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, hidden: Sequence[int], dropout: float) -> None:
        super().__init__()
        self.dropout, self.depth = dropout, len(hidden) + 1
        for index, (fan_in, fan_out) in enumerate(pairwise((prod(input_shape), *hidden, classes)), start=1):
            layer = nn.Linear(fan_in, fan_out)
            nn.init.normal_(layer.weight, std=0.1)
            nn.init.zeros_(layer.bias)
            self.add_module(f"fc{index}", layer)

    def forward(self, images: Tensor) -> Tensor:
        """Return the outputs of the last layer before the sigmoid."""
        found = images.flatten(1)
        for index in range(1, self.depth + 1):
            found = self.get_submodule(f"fc{index}")(found)
            if index > 1 and not self.training:
                found = found * (1 - self.dropout)
            if index < self.depth:
                found = torch.relu(found)
                if self.training:
                    dropped = torch.rand_like(found) < self.dropout
                    found = found - found.detach() * dropped
        return found


class SquaredError(nn.Module):
    """Mean squared error of sigmoid(z), with the gradient of the authors' code.

    The authors apply the derivative of the sigmoid to p = sigmoid(z) in place of z, so the gradient of an example by z
    is (p - t) q (1 - q) with q = sigmoid(p).
    """

    def forward(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over examples and classes of (p - t)^2."""
        found = outputs.sigmoid()
        wrong = found - nn.functional.one_hot(labels, outputs.shape[1]).to(found)
        slope = found.sigmoid() * (1 - found.sigmoid())
        carrier = ((wrong * slope).detach() * outputs).sum() / len(outputs)
        return wrong.square().mean().detach() + carrier - carrier.detach()


class DecayingSGD(Optimizer):
    """SGD with momentum and decoupled decay: v <- m v - lr g, w <- w + v - decay w.

    Args:
        params: parameters to train.
        lr: learning rate.
        momentum: fraction of the last change that is added to the next.
        decay: fraction of a parameter that is subtracted in each step, whatever the learning rate.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.9, decay: float = 2e-4) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            trained = [each for each in group["params"] if each.grad is not None]
            moved = [self.state[each].setdefault("momentum_buffer", torch.zeros_like(each)) for each in trained]
            torch._foreach_mul_(moved, group["momentum"])
            torch._foreach_add_(moved, [each.grad for each in trained], alpha=-group["lr"])
            torch._foreach_mul_(trained, 1 - group["decay"])
            torch._foreach_add_(trained, moved)
        return loss
