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
        y = F.relu(self.first(x.float()))
        found: Tensor = self.last(y if self.skips(x) else F.relu(self.hidden(y)))
        return found


BRANCHES: dict[str, Callable[[Tensor], bool]] = {
    "a large batch": lambda x: x.shape[0] > 500,
    "a long sequence": lambda x: x.shape[1] > 100,
    "a multiple": lambda x: x.shape[1] % 32 == 0,
    "half precision": lambda x: x.dtype is torch.float16,
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
        "not compared for batches of 501, at which the forward may branch, which would take too much memory",
    )


class Flagged(Branching):
    """Layers of which two are skipped when a flag is set."""

    def forward(self, x: Tensor, skips: bool = False, deep: bool | None = None) -> Tensor:
        self.skips = lambda _: skips or bool(deep)
        return super().forward(x)


def test_flags_with_which_the_smaller_network_computes_something_else_are_named() -> None:
    x = torch.randn(2, 5, 12)
    torch.manual_seed(0)
    model = Flagged(bool).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)

    with pytest.warns(UserWarning, match="shrink: with `") as warned:
        smaller = pruning.shrink(model, x)

    assert smaller.shrunk.form == "module"
    for flag, each, said in zip(("skips=True", "deep=True"), warned, smaller.shrunk.tried, strict=True):
        assert str(each.message) == f"shrink: {said}"
        assert said.startswith(f"with `{flag}`, which the example's call does not have, outputs differ by ")


def test_flags_that_change_nothing_in_the_channels_are_not_named() -> None:
    x = torch.randn(2, 5, 12)
    torch.manual_seed(0)
    model = Scaled(lambda _: False).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)

    assert pruning.shrink(model, x).shrunk.tried == ()


class Scaled(Branching):
    """Layers whose output a flag doubles."""

    def forward(self, x: Tensor, doubles: bool = False) -> Tensor:
        return super().forward(x) * (1 + doubles)
