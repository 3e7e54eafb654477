"""A pruned network, a plain network with equal outputs, and training for both."""

from __future__ import annotations

import io
from collections.abc import Callable

import torch
from torch import Tensor, nn

import pruning

INPUTS = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def pruned() -> nn.Sequential:
    model = network()
    for layer in (model[0], model[2]):
        pruning.l1_unstructured(layer, "weight", 0.5)
    return model


def dense(model: nn.Module, empty: nn.Module) -> nn.Module:
    """Load into `empty` the parameters of the pruned `model`, masked by hand."""
    state = model.state_dict()
    for name in [name for name in state if name.endswith("_orig")]:
        mask = state.pop(name.replace("_orig", "_mask"))
        state[name.removesuffix("_orig")] = torch.where(mask == 0, 0.0, state.pop(name))
    empty.load_state_dict(state)
    return empty


def train(run: Callable[..., Tensor], model: nn.Module, *inputs: Tensor, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        run(*inputs).square().sum().backward()
        optimizer.step()


def save_and_load(model: nn.Module) -> nn.Module:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded: nn.Module = torch.load(stream, weights_only=False)
    return loaded
