"""Failed calls change no module, and methods get a copy of the active mask."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from against_torch import linear, snapshot
from torch import Tensor, nn

import pruning


class FailingMask(pruning.L1Unstructured):
    """A method that computes a mask, and fails when it applies the mask."""

    def apply_mask(self, module: nn.Module) -> Tensor:
        raise ArithmeticError("on the way")


def test_an_own_apply_mask_that_raises_changes_nothing() -> None:
    layer = linear([[1.0, 2.0], [3.0, 4.0]])
    pruning.identity(layer, "bias")
    before, order = snapshot(layer), list(layer._parameters)
    with pytest.raises(ArithmeticError):
        FailingMask.apply(layer, "weight", 1)
    assert snapshot(layer) == before
    assert list(layer._parameters) == order
    pruning.l1_unstructured(layer, "weight", 1)
    assert layer(torch.ones(1, 2)).shape == (1, 2)


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.MultiheadAttention(4, 1).out_proj, "weight"), (nn.LSTM(2, 2), "weight_ih_l0")],
    ids=["out_proj", "LSTM"],
)
def test_a_module_of_its_own_kind_is_restored_too(module: nn.Module, name: str) -> None:
    kind, parameters = type(module), list(module.parameters())
    with pytest.raises(ArithmeticError):
        FailingMask.apply(module, name, 1)
    assert type(module) is kind
    for held in (module.parameters(), getattr(module, "_flat_weights", parameters)):
        assert all(now is before for now, before in zip(held, parameters, strict=True))


Pairs = list[tuple[nn.Module, str]]
CALLS: dict[str, Callable[[Pairs], object]] = {
    "global_unstructured": lambda pairs: pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=2),
    "global_structured": lambda pairs: pruning.global_structured(pairs, amount=2),
    "MaskSet.apply": lambda pairs: pruning.MaskSet({f"{i}.weight": torch.eye(2) for i in range(3)}).apply(
        nn.Sequential(*(module for module, _ in pairs))
    ),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_commit_that_fails_at_the_last_module_changes_no_other(call: Callable[[Pairs], object]) -> None:
    first, pruned, bad = (linear([[1.0, 2.0], [3.0, 4.0]]) for _ in range(3))
    pruning.l1_unstructured(pruned, "weight", 1)
    pruning.identity(bad, "weight")
    bad.weight = nn.Parameter(torch.ones(2, 2))  # hides the pruned weight, which only the commit notices
    before = [snapshot(module) for module in (first, pruned)]
    pairs: Pairs = [(module, "weight") for module in (first, pruned, bad)]
    with pytest.raises(TypeError, match="was assigned a parameter"):
        call(pairs)
    assert [snapshot(module) for module in (first, pruned)] == before
    del bad.weight
    call(pairs)
    assert all(pruning.is_pruned(module) for module, _ in pairs)


class Vandal(pruning.BasePruningMethod):
    """A method that writes into the mask that it gets."""

    PRUNING_TYPE = "global"

    def compute_mask(self, t: Tensor, default_mask: Tensor) -> Tensor:
        default_mask.zero_()
        raise ArithmeticError("on the way")


def test_a_global_method_is_shown_a_copy_of_the_mask() -> None:
    first, second = linear([[1.0, 2.0, 3.0]]), linear([[0.0, 0.0, 0.0]])
    second.weight = first.weight
    pruning.global_unstructured([(first, "weight"), (second, "weight")], pruning.L1Unstructured, amount=1)
    with pytest.raises(ArithmeticError):
        Vandal.apply(first, "weight")
    assert first.weight_mask.tolist() == second.weight_mask.tolist() == [[0, 1, 1]]


@pytest.mark.parametrize("call", [pruning.l1_unstructured, pruning.random_unstructured, pruning.custom_from_mask])
def test_a_call_on_one_module_leaves_the_mask_of_a_tied_one(call: object) -> None:
    first, second = linear([[1.0, 2.0, 3.0]]), linear([[0.0, 0.0, 0.0]])
    second.weight = first.weight
    pruning.global_unstructured([(first, "weight"), (second, "weight")], pruning.L1Unstructured, amount=1)
    call(first, "weight", torch.zeros(1, 3) if call is pruning.custom_from_mask else 2)  # type: ignore[operator]
    assert not first.weight_mask.any()
    assert second.weight_mask.tolist() == [[0, 1, 1]]
