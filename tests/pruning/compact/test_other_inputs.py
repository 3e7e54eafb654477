"""Inputs of other sizes and ranks at which a smaller network is compared, and those at which it is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sampling import sampled
from torch import Tensor, nn

import pruning
from pruning.compact import other_inputs
from pruning.graph.tracing import traced


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
    "a third case": lambda x: x.shape[1] > 20 if x.shape[1] > 10 else False,
    "two sizes at once": lambda x: x.shape[0] > 20 and x.shape[1] > 20,
    "a larger of two": lambda x: max(x.shape[1], 16) > 40,
    "a feature map with one more": lambda x: F.pad(x, (0, 0, 1, 0)).shape[1] > 17,
    "many pieces": lambda x: len(x.split(50)) > 1,
    "half precision": lambda x: x.dtype is torch.float16,
    "another precision": lambda x: x.dtype is torch.bfloat16,
    "many entries": lambda x: x.shape[0] * x.shape[1] > 2500,
    "a higher rank": lambda x: x.ndim == 4,
}


def masked(skips: Callable[[Tensor], bool], x: Tensor) -> nn.Module:
    torch.manual_seed(0)
    model = Branching(skips).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)
    return model


@sampled(3)
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


class Stateful(Branching):
    """Two recurrent layers whose states have the batch second."""

    def __init__(self, skips: Callable[[Tensor], bool]) -> None:
        super().__init__(skips)
        self.steps = nn.GRU(12, 12, 2, batch_first=True)

    def forward(self, x: Tensor, states: Tensor) -> Tensor:
        return super().forward(self.steps(x, states)[0])


def stateful(batch: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, 5, 12), torch.randn(2, batch, 12)


@pytest.mark.filterwarnings("ignore:.* stay dense")
def test_a_batch_that_is_no_first_dimension_of_some_inputs_is_found() -> None:
    model = Stateful(lambda x: x.shape[0] > 40).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=stateful(3))

    shrunk = pruning.shrink(model, stateful(3)).shrunk

    assert shrunk.form == "graph"
    assert "for inputs of (41, 5, 12) torch.float32, (2, 41, 12)" in shrunk.tried[0]


def test_a_trace_of_one_sequence_and_its_states_holds_for_others() -> None:
    whole = traced(Stateful(lambda _: False).eval(), stateful(1), sizes="any").whole

    assert not whole.guard.refusal(stateful(3), {})


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


class Featured(Branching):
    """Layers that return hidden features, too, if a flag is set; another flag ends the program, a third prints."""

    def forward(self, x: Tensor, features: bool = False, ends: bool = False, prints: bool = False) -> Any:
        if ends:
            raise SystemExit
        if prints:
            print("printed")
        found = super().forward(x)
        return (found, self.first(x)) if features else found


def test_flags_whose_outputs_have_other_shapes_are_told_without_a_warning(capsys: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(2, 5, 12)
    torch.manual_seed(0)
    model = Featured(lambda _: False).eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)

    shrunk = pruning.shrink(model, x).shrunk

    assert shrunk.form == "module"
    assert shrunk.tried == ("not compared for `features=True`, whose outputs have other shapes",)
    assert capsys.readouterr().out == ""


class OfTwoParts(nn.Module):
    """A part that becomes a graph and one that keeps its class, with data that decide between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Branching(lambda x: x.shape[1] > 100), Flagged(bool)
        self.second.last = nn.Linear(16, 12)

    def forward(self, x: Tensor, skips: bool = False) -> Tensor:
        second: Tensor = self.second(x, skips)
        return self.first(second) if bool(second.sum() > -1e9) else second


@pytest.mark.filterwarnings("ignore:groups are found within the modules")
def test_flags_are_tried_where_one_part_is_a_graph() -> None:
    x = torch.randn(2, 5, 12)
    torch.manual_seed(0)
    model = OfTwoParts().eval()
    pruning.prune(model, "magnitude", sparsity=0.5, unit="group", scope="layer", budget="channels", example=x)

    with pytest.warns(UserWarning, match="shrink: with `skips=True`"):
        shrunk = pruning.shrink(model, x).shrunk

    assert shrunk.parts == {"first": "graph", "second": "module"}


class Scaled(Branching):
    """Layers whose output a flag doubles."""

    def forward(self, x: Tensor, doubles: bool = False) -> Tensor:
        return super().forward(x) * (1 + doubles)
