"""Inputs of other sizes and ranks at which a smaller network is compared, and those at which it is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pruning
from pruning.compact import other_inputs


class Branching(nn.Module):
    """Linear layers, of which an input that fulfils a condition skips one."""

    def __init__(self, skips: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.skips = skips

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        found: Tensor = self.last(y if self.skips(x) else F.relu(self.hidden(y)))
        return found


BRANCHES: dict[str, Callable[[Tensor], bool]] = {
    "a large batch": lambda x: x.shape[0] > 500,
    "many entries": lambda x: x.shape[0] * x.shape[1] > 2500,
    "a higher rank": lambda x: x.ndim == 4,
}


def masked(skips: Callable[[Tensor], bool], x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Branching(skips).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)
    return model


@pytest.mark.parametrize("name", BRANCHES)
def test_a_class_that_differs_on_the_other_side_of_a_branch_becomes_a_graph(name: str) -> None:
    x = torch.randn(2, 5, 12)

    shrunk = pruning.shrink(masked(BRANCHES[name], x), x).shrunk

    assert shrunk.form == "graph"
    assert "of the largest for inputs of (" in shrunk.tried[0]


def test_batches_that_would_take_too_much_memory_are_not_tried_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_inputs, "MOST_ENTRIES", 400 * 5 * 12 * 16)
    x = torch.randn(2, 5, 12)

    shrunk = pruning.shrink(masked(BRANCHES["a large batch"], x), x).shrunk

    assert shrunk.form == "module"
    assert shrunk.tried == (
        "not compared for batches at which x.shape[0] <= 500 fails, which would take too much memory",
    )
