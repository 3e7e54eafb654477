"""Network of the golden values: 4 inputs, 4 hidden units, 3 classes; 28 weights in float64."""

from __future__ import annotations

import torch
from torch import Tensor, nn

W1 = [[0.50, -0.30, 0.80, 0.10], [-0.60, 0.40, 0.20, -0.90], [0.25, 0.70, -0.45, 0.35], [-0.15, 0.55, 0.65, 0.05]]
W2 = [[0.36, -0.07, 0.16, 0.03], [-0.28, 0.31, 0.02, -0.18], [0.06, 0.13, -0.41, 0.86]]
B1, B2 = [0.10, -0.20, 0.05, 0.15], [0.05, -0.10, 0.02]
X = torch.tensor(
    [
        *([1.0, 0.8, -0.5, 0.1], [-0.3, -1.5, 0.6, -0.4], [0.4, 1.8, 0.9, 0.2]),
        *([-1.2, 0.6, 0.2, 0.3], [0.6, -1.1, 1.1, -0.2], [0.2, 1.2, -0.8, 0.5]),
    ],
    dtype=torch.float64,
)
Y = torch.tensor([0, 1, 2, 1, 0, 2])
NAMES = ("fc1.weight", "fc2.weight")
LENET_300_100 = {"fc1.weight": (300, 784), "fc2.weight": (100, 300), "fc3.weight": (10, 100)}
LENET_5 = {
    "conv1.weight": (20, 1, 5, 5),
    "conv2.weight": (50, 20, 5, 5),
    "fc1.weight": (500, 800),
    "fc2.weight": (10, 500),
}


class Golden(nn.Module):
    """W2 relu(W1 x + b1) + b2."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(4, 4).double(), nn.Linear(4, 3).double()
        with torch.no_grad():
            for layer, weight, bias in ((self.fc1, W1, B1), (self.fc2, W2, B2)):
                layer.weight.copy_(torch.tensor(weight, dtype=torch.float64))
                layer.bias.copy_(torch.tensor(bias, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


BATCHES = [(X, Y)]


def bits(masks) -> str:
    """Return both masks by rows as 0 and 1, in the order of the golden values."""
    return "".join("1" if kept else "0" for name in NAMES for kept in masks[name].flatten().tolist())
