"""Smaller networks in calls that run further modules than the example's: in training, and with other flags."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pruning
from pruning.compact.training_calls import outputs_in_training
from pruning.graph.tracing import output_difference


class Deep(nn.Module):
    """Linear layers; in training, `aux` reads what the hidden layer reads, or the hidden layer is left out."""

    def __init__(self, *, skips: bool = False, draws: bool = False) -> None:
        super().__init__()
        self.first, self.hidden, self.out = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)
        self.aux, self.skips, self.draws = nn.Sequential(nn.Dropout(), nn.Linear(16, 3)), skips, draws

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.dropout(F.relu(self.first(x)), 0.3, self.training)
        y = x if self.skips and self.training else F.relu(self.hidden(x))
        if self.draws and self.training:
            y = y + torch.randn_like(y)
        return (self.out(y), self.aux(x)) if self.training and not self.skips else (self.out(y),)


def masked(model: nn.Module, x: Tensor) -> nn.Module:
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)
    return model.eval()


def test_channels_that_a_module_reads_in_training_alone_are_kept_and_said() -> None:
    x = torch.randn(2, 12)
    model = masked(Deep(), x)

    smaller = pruning.shrink(model, x)

    assert (smaller.shrunk.form, smaller.shrunk.tried) == ("module", ())
    assert smaller.shrunk.kept["first.weight"] == {"`aux` reads it in training": 8}
    assert smaller.out.in_features == 8
    outputs = [outputs_in_training(each, ((x,), {})) for each in (smaller, copy.deepcopy(model))]
    assert len(outputs[0]) == 2
    assert output_difference(*outputs) < 1e-5


def test_a_class_that_computes_other_numbers_in_training_becomes_a_graph() -> None:
    x = torch.randn(2, 12)

    shrunk = pruning.shrink(masked(Deep(skips=True), x), x).shrunk

    assert shrunk.form == "graph"
    assert shrunk.tried[0].endswith("of the largest for inputs of (2, 12) torch.float32 with the training flag set")


def test_a_class_is_not_compared_in_training_where_chance_decides() -> None:
    x = torch.randn(2, 12)

    shrunk = pruning.shrink(masked(Deep(draws=True), x), x).shrunk

    assert shrunk.form == "module"
    assert shrunk.tried == (
        "not compared for inputs of (2, 12) torch.float32 with the training flag set, where rounding or chance changes "
        "the outputs",
    )


class Tasks(nn.Module):
    """A body with one head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(12, 16)
        self.heads = nn.ModuleDict({each: nn.Linear(16, 3) for each in "ab"})

    def forward(self, x: Tensor, task: str = "a") -> Tensor:
        found: Tensor = self.heads[task](F.relu(self.body(x)))
        return found


@pytest.mark.filterwarnings("ignore:.*stay dense")
def test_modules_that_the_call_of_the_example_does_not_run_are_named() -> None:
    x = torch.randn(2, 12)
    model = masked(Tasks(), x)
    with pytest.warns(UserWarning, match=r"does not run heads\.b: calls that run them may fail") as warned:
        shrunk = pruning.shrink(model, x).shrunk

    assert [f"shrink: {each}" for each in shrunk.tried] == [str(each.message) for each in warned]
    assert pruning.shrink(Tasks(), x).shrunk.tried == ()  # all stays, so no call changes
