"""What the tests of mended defects share: run a test against both libraries, make a layer, note a module's state."""

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
"""Runs the test against both: it must pass with ours and fail with torch's."""


def linear(weight: list[list[float]]) -> nn.Linear:
    values = torch.tensor(weight)
    layer = nn.Linear(values.shape[1], values.shape[0])
    with torch.no_grad():
        layer.weight.copy_(values)
    return layer


def snapshot(module: nn.Module) -> tuple[object, ...]:
    """All that a failed call might have changed."""
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
