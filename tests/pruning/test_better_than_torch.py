"""Defects of `torch.nn.utils.prune` that this package corrects: numbers 1 to 5 of 15, on scores and state.

Where it is cheap, a test also runs against torch and must fail there, so that a fix in torch is noticed.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from typing import Any

import cloudpickle
import pytest
import torch
from against_torch import LIBRARIES, linear, snapshot
from torch import nn

import pruning


@pytest.mark.parametrize("library", LIBRARIES)
def test_01_scores_are_fresh_after_an_optimizer_step(library: Any) -> None:
    layer = linear([[1.0, 2.0, 3.0, 4.0]])
    library.l1_unstructured(layer, "weight", 1)
    with torch.no_grad():
        layer.weight_orig.copy_(torch.tensor([[9.0, 8.0, 7.0, 0.5]]))
    library.l1_unstructured(layer, "weight", 1)
    assert layer.weight_mask.tolist() == [[0, 1, 1, 0]]


@pytest.mark.parametrize("library", LIBRARIES)
def test_01_scores_are_fresh_after_load_state_dict(library: Any) -> None:
    layer = linear([[1.0, 2.0, 3.0, 4.0]])
    library.identity(layer, "weight")
    layer.load_state_dict({**layer.state_dict(), "weight_orig": torch.tensor([[4.0, 3.0, 2.0, 1.0]])})
    library.ln_structured(layer, "weight", 1, n=1, dim=1)
    assert layer.weight_mask.tolist() == [[1, 1, 1, 0]]


FAILURES: dict[str, dict[str, Any]] = {
    "int too large": {"amount": 99},
    "bad constructor argument": {"amount": 1.5},
    "wrong score shape": {"amount": 1, "importance_scores": torch.ones(3, 2)},
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("failure", FAILURES)
def test_02_a_failed_second_application_changes_nothing(library: Any, failure: str) -> None:
    layer = linear([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    library.l1_unstructured(layer, "weight", 2)
    before = snapshot(layer)
    with pytest.raises((ValueError, AssertionError)):
        library.l1_unstructured(layer, "weight", **FAILURES[failure])
    assert snapshot(layer) == before
    assert library.is_pruned(layer)
    library.remove(layer, "weight")


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_02_rollback_in_every_round(failure: str, rounds: int) -> None:
    layer = linear([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    for _ in range(rounds):
        pruning.l1_unstructured(layer, "weight", 1)
    before = snapshot(layer)
    with pytest.raises(ValueError, match="`"):
        pruning.l1_unstructured(layer, "weight", **FAILURES[failure])
    assert snapshot(layer) == before


def test_02_rollback_of_a_custom_method_that_raises_later() -> None:
    class Fragile(pruning.BasePruningMethod):
        PRUNING_TYPE = "unstructured"

        def compute_mask(self, t: torch.Tensor, default_mask: torch.Tensor) -> torch.Tensor:
            raise ArithmeticError("on the way")

    layer = linear([[1.0, 2.0]])
    pruning.identity(layer, "weight")
    before = snapshot(layer)
    with pytest.raises(ArithmeticError, match="on the way"):
        Fragile.apply(layer, "weight")
    assert snapshot(layer) == before


@pytest.mark.parametrize("library", LIBRARIES)
def test_03_deepcopy_of_a_pruned_module(library: Any) -> None:
    layer = linear([[1.0, 2.0, 3.0, 4.0]])
    library.l1_unstructured(layer, "weight", 2)
    layer(torch.ones(1, 4))
    twice = copy.deepcopy(copy.deepcopy(layer))
    with torch.no_grad():
        twice.weight_orig.fill_(7.0)
    assert twice(torch.ones(1, 4)).item() == pytest.approx(14.0 + twice.bias.item())
    assert layer.weight_orig.tolist() == [[1, 2, 3, 4]]


@pytest.mark.parametrize(
    "between",
    [
        lambda layer: pickle.loads(pickle.dumps(layer)),
        lambda layer: pruning.l1_unstructured(pickle.loads(pickle.dumps(layer)), "weight", 0.5),
        lambda layer: copy.copy(layer),
        lambda layer: [other := copy.copy(layer), other(torch.ones(1, 3))][0],
        lambda layer: [copy.copy(layer)(torch.ones(1, 3)), layer][1],
    ],
    ids=["unpickled", "unpickled and pruned", "shallow copy", "shallow copy in use", "copied"],
)
def test_03_deepcopy_whatever_was_copied_before(between: Any) -> None:
    original = pruning.l1_unstructured(nn.Linear(3, 4), "weight", 0.5)
    layer = between(original)
    copied = copy.deepcopy(layer)
    assert torch.equal(copied.weight, layer.weight)
    copied.weight.sum().backward()
    assert layer.weight_orig.grad is None


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), lambda m: cloudpickle.loads(cloudpickle.dumps(m))],
    ids=["deepcopy", "pickle", "cloudpickle"],
)
def test_03_copies_are_whole_and_independent(duplicate: Any) -> None:
    model = nn.Sequential(linear([[1.0, -2.0], [3.0, 0.5]]), nn.ReLU(), nn.Linear(2, 1))
    pruning.l1_unstructured(model[0], "weight", 1, generator=torch.Generator())
    pruning.random_unstructured(model[0], "weight", 1, generator=torch.Generator())
    with torch.no_grad():
        model[0].weight_orig.add_(1.0)  # pruned entries move; a copy must mask them as the original does
    copied = duplicate(model)
    inputs = torch.randn(3, 2)
    assert torch.equal(copied(inputs), model(inputs))
    copied(inputs).sum().backward()
    assert model[0].weight_orig.grad is None
    assert copied[0].weight_orig.grad is not None
    again = duplicate(copied)
    assert torch.equal(again(inputs), model(inputs))
    pruning.l1_unstructured(again[0], "weight", 1)
    assert int((again[0].weight_mask == 0).sum()) == 3


@pytest.mark.parametrize("library", LIBRARIES)
def test_04_custom_from_mask_lets_go_of_its_mask(library: Any) -> None:
    layer = nn.Linear(64, 64)
    library.custom_from_mask(layer, "weight", torch.ones(64, 64))
    stored = io.BytesIO()
    torch.save(layer, stored)
    assert stored.tell() < 3.5 * layer.weight_orig.nbytes  # the parameter, its mask, the current value


def held_bytes() -> int:
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) in (torch.Tensor, nn.Parameter)  # no fake tensors left by compilation
        and tensor.layout is torch.strided  # sparse tensors, left by another test, have no storage
    }
    return sum(storages.values())


@pytest.mark.parametrize("library", LIBRARIES)
def test_04_a_global_pruning_keeps_one_mask_for_each_parameter(library: Any) -> None:
    before = held_bytes()
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    weights = 4 * 128 * 128 * 4
    library.global_unstructured([(m, "weight") for m in model], library.L1Unstructured, amount=0.5)
    assert held_bytes() - before <= 3 * weights + 4096  # parameter, mask, current value
    stored = io.BytesIO()
    torch.save(model[0], stored)
    assert stored.tell() < 3.5 * weights / 4


@pytest.mark.parametrize("library", LIBRARIES)
def test_05_parameter_order_survives(library: Any) -> None:
    dense = [name for name, _ in nn.Linear(3, 3).named_parameters()]
    layer = nn.Linear(3, 3)
    library.random_unstructured(layer, "weight", 0.5)
    assert [name for name, _ in layer.named_parameters()] == ["weight_orig", "bias"]
    library.remove(layer, "weight")
    assert [name for name, _ in layer.named_parameters()] == dense


def test_05_a_dense_adam_state_loads_onto_the_right_parameters() -> None:
    dense, pruned = nn.Linear(3, 3), nn.Linear(3, 3)
    optimizer = torch.optim.Adam(dense.parameters())
    dense(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    pruning.l1_unstructured(pruned, "weight", 0.5)
    restored = torch.optim.Adam(pruned.parameters())
    restored.load_state_dict(optimizer.state_dict())
    assert restored.state[pruned.weight_orig]["exp_avg"].shape == (3, 3)
    assert restored.state[pruned.bias]["exp_avg"].shape == (3,)
