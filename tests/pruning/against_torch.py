"""Helpers for tests against both libraries, ours and torch's: parameters, a layer, a snapshot of a module."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune as torch_prune
from torch import nn

import pruning

LIBRARIES = [
    pytest.param(pruning, id="pruning"),
    pytest.param(torch_prune, id="torch", marks=pytest.mark.xfail(strict=True)),
]
"""Parameters that run a test with both libraries: it must pass with ours and fail with torch's."""


def linear(weight: list[list[float]]) -> nn.Linear:
    values = torch.tensor(weight)
    layer = nn.Linear(values.shape[1], values.shape[0])
    with torch.no_grad():
        layer.weight.copy_(values)
    return layer


def snapshot(module: nn.Module) -> tuple[object, ...]:
    """Return everything in a module that a failed call might change."""
    return (
        [(name, id(p), p._version) for name, p in module.named_parameters()],
        [(name, id(b), b.clone().tolist()) for name, b in module.named_buffers()],
        [
            (key, id(hook), len(getattr(hook, "_pruning_methods", ())))
            for key, hook in module._forward_pre_hooks.items()
        ],
        sorted(module.__dict__),
        module.weight.detach().tolist(),
    )
