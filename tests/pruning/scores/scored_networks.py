"""Test networks for scores, in float64, with their data and helpers for slow references."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

GOLDEN: dict[str, list[float]] = json.loads(Path(__file__).with_name("golden.json").read_text())
"""Values for `golden_network`, W1 by rows and then W2, computed from the written-out formulas without this package."""

Batch = tuple[Tensor, Tensor]

W1 = [[0.50, -0.30, 0.80, 0.10], [-0.60, 0.40, 0.20, -0.90], [0.25, 0.70, -0.45, 0.35], [-0.15, 0.55, 0.65, 0.05]]
W2 = [[0.36, -0.07, 0.16, 0.03], [-0.28, 0.31, 0.02, -0.18], [0.06, 0.13, -0.41, 0.86]]
B1, B2 = [0.10, -0.20, 0.05, 0.15], [0.05, -0.10, 0.02]
X = [[1, 0.8, -0.5, 0.1], [-0.3, -1.5, 0.6, -0.4], [0.4, 1.8, 0.9, 0.2]]
X += [[-1.2, 0.6, 0.2, 0.3], [0.6, -1.1, 1.1, -0.2], [0.2, 1.2, -0.8, 0.5]]
GOLDEN_BATCH: Batch = (torch.tensor(X, dtype=torch.float64), torch.tensor([0, 1, 2, 1, 0, 2]))


def golden_network() -> nn.Sequential:
    """Build a network of 4 inputs, 4 hidden units with ReLU and 3 classes."""
    model = nn.Sequential(OrderedDict(fc1=nn.Linear(4, 4), relu=nn.ReLU(), fc2=nn.Linear(4, 3))).double()
    state = {"fc1.weight": W1, "fc1.bias": B1, "fc2.weight": W2, "fc2.bias": B2}
    model.load_state_dict({name: torch.tensor(values, dtype=torch.float64) for name, values in state.items()})
    return model


def conv_network(activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    """Build two convolutions (one padded, one strided and grouped) with BatchNorm and a linear layer, in eval mode."""
    torch.manual_seed(1)
    layers = OrderedDict[str, nn.Module](
        conv1=nn.Conv2d(2, 4, 3, padding=1, bias=False),
        bn1=nn.BatchNorm2d(4),
        act1=activation(),
        dropout=nn.Dropout(0.5),
        conv2=nn.Conv2d(4, 4, 3, stride=2, groups=2),
        act2=activation(),
        flatten=nn.Flatten(),
        fc=nn.Linear(16, 3),
    )
    model = nn.Sequential(layers).double()
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if name.startswith("bn1") and values.is_floating_point():
                values.copy_(torch.rand_like(values) + 0.5)
    return model.eval()


def conv_batch(examples: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(examples, 2, 6, 6, generator=generator, dtype=torch.float64)
    return inputs, torch.randint(3, (examples,), generator=generator)


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def split(batch: Batch, *sizes: int) -> list[Batch]:
    return list(zip(*(part.split(sizes) for part in batch), strict=True))


def golden(name: str) -> Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def assert_close(actual: Tensor, expected: Tensor, rtol: float = 1e-9, atol: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def flat(scores: Mapping[str, Tensor]) -> Tensor:
    """Concatenate all scores in the order of the model."""
    return torch.cat([score.flatten() for score in scores.values()])


def values_of(model: nn.Module, names: list[str]) -> dict[str, Tensor]:
    state = model.state_dict()
    return {name: state[name].clone() for name in names}


def loss_as_function(model: nn.Module, batch: Batch) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """Return the mean loss as a function of name -> weight; other parameters keep the model's values."""
    return lambda values: F.cross_entropy(functional_call(model, dict(values), (batch[0],)), batch[1])


def finite_differences(function: Callable[[Mapping[str, Tensor]], Tensor], values: dict[str, Tensor]) -> Tensor:
    """Compute the gradient of `function` at `values` by central differences, as one flat tensor."""
    slopes, step = [], 1e-6
    with torch.no_grad():
        for value in values.values():
            entries = value.view(-1)
            for index in range(len(entries)):
                before = entries[index].item()
                entries[index] = before + step
                high = function(values)
                entries[index] = before - step
                slopes.append((high - function(values)) / (2 * step))
                entries[index] = before
    return torch.stack(slopes)
