"""A later round overwrites the mask and the masked tensor of the round before, unless anybody could see it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pruning
from pruning import memory

pytestmark = pytest.mark.skipif(not hasattr(torch.Tensor, "_use_count"), reason="this torch does not count holders")

ROUNDS: dict[str, dict[str, Any]] = {
    "half by magnitude": {"method": pruning.L1Unstructured, "first": 0.5, "then": 0.5},
    "few by magnitude": {"method": pruning.L1Unstructured, "first": 0.98, "then": 0.3},
    "few at random": {"method": pruning.RandomUnstructured, "first": 0.98, "then": 0.3},
    "all that is left": {"method": pruning.L1Unstructured, "first": 0.98, "then": 1.0},
    "rows": {"method": pruning.LnStructured, "first": 0.5, "then": 0.5, "n": 2, "dim": 0},
    "columns": {"method": pruning.LnStructured, "first": 0.5, "then": 0.5, "n": 2, "dim": 1},
}


@pytest.fixture(autouse=True)
def _all_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "LARGE", 0)


@pytest.fixture(params=ROUNDS.values(), ids=ROUNDS)
def rounds(request: pytest.FixtureRequest) -> dict[str, Any]:
    return dict(request.param)


def prune(layer: nn.Module, rounds: dict[str, Any], which: str) -> None:
    arguments = {key: value for key, value in rounds.items() if key not in ("method", "first", "then")}
    generator = torch.Generator().manual_seed(len(which))
    rounds["method"].apply(layer, "weight", amount=rounds[which], generator=generator, **arguments)


def pruned_once(rounds: dict[str, Any]) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(60, 70)
    prune(layer, rounds, "first")
    return layer


def places(layer: nn.Module) -> tuple[int, int]:
    return layer.weight_mask.data_ptr(), layer.weight.data_ptr()  # type: ignore[operator, union-attr]


def loss_of(layer: nn.Module) -> torch.Tensor:
    return layer(torch.linspace(-1, 1, 120).view(2, 60)).square().sum()  # type: ignore[no-any-return]


def expected(layer: nn.Linear, rounds: dict[str, Any]) -> nn.Linear:
    """What the next round leaves of a copy that is watched, so that nothing of it is overwritten."""
    other = copy.deepcopy(layer)
    watched = other.weight_mask, other.weight
    before = places(other)
    prune(other, rounds, "then")
    assert set(places(other)).isdisjoint(before)
    del watched
    return other


def step(layer: nn.Linear) -> None:
    loss_of(layer).backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def step_and_look(layer: nn.Linear) -> None:
    step(layer)
    with torch.no_grad():
        layer(torch.zeros(1, 60))


BETWEEN: dict[str, Callable[[nn.Linear], object]] = {
    "nothing": lambda layer: None,
    "a forward": loss_of,
    "a step": step,
    "a step and an evaluation": step_and_look,
    "its state loaded": lambda layer: layer.load_state_dict(copy.deepcopy(layer.state_dict())),
}


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN)
def test_what_nobody_sees_is_overwritten_to_the_same_effect(rounds: dict[str, Any], between: Any) -> None:
    layer = pruned_once(rounds)
    between(layer)
    other, before = expected(layer, rounds), places(layer)
    prune(layer, rounds, "then")
    assert places(layer) == before
    assert torch.equal(layer.weight_mask, other.weight_mask)
    assert torch.equal(layer.weight, other.weight)
    assert torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)
    for each in (layer, other):
        each.zero_grad()
        loss_of(each).backward()
    assert torch.equal(layer.weight_orig.grad, other.weight_orig.grad)


WATCHERS: dict[str, Callable[[nn.Linear], Any]] = {
    "the mask": lambda layer: layer.weight_mask,
    "its detached self": lambda layer: layer.weight_mask.detach(),
    "a row of it": lambda layer: layer.weight_mask[3],
    "its NumPy view": lambda layer: layer.weight_mask.numpy(),
    "its storage": lambda layer: layer.weight_mask.untyped_storage(),
    "the state dict": lambda layer: layer.state_dict()["weight_mask"],
    "the buffers": lambda layer: next(iter(list(layer.buffers()))),
    "a shallow copy's": lambda layer: copy.copy(layer).weight,
    "the masked tensor": lambda layer: layer.weight,
    "the masked tensor, detached": lambda layer: layer.weight.detach(),
    "the masked tensor, transposed": lambda layer: layer.weight.t(),
    "the masked tensor in a history": lambda layer: (layer.weight * 1).view(-1),
}


def content(watched: Any) -> list[float]:
    values = watched.detach() if isinstance(watched, torch.Tensor) else watched
    return list(values.tolist())


@pytest.mark.parametrize("watch", WATCHERS.values(), ids=WATCHERS)
def test_what_somebody_holds_stays_as_it_was(rounds: dict[str, Any], watch: Any) -> None:
    layer = pruned_once(rounds)
    other = expected(layer, rounds)
    watched = watch(layer)
    before = content(watched)
    prune(layer, rounds, "then")
    assert content(watched) == before
    assert torch.equal(layer.weight_mask, other.weight_mask)
    assert torch.equal(layer.weight, other.weight)


@pytest.mark.parametrize("retain", [False, True])
def test_a_backward_after_the_round_is_that_of_the_forward_before(rounds: dict[str, Any], retain: bool) -> None:
    layer = pruned_once(rounds)
    other = copy.deepcopy(layer)
    loss_of(other).backward()
    loss = loss_of(layer)
    if retain:
        loss.backward(retain_graph=True)
        layer.zero_grad()
    prune(layer, rounds, "then")
    loss.backward()
    assert torch.equal(layer.weight_orig.grad, other.weight_orig.grad)


def test_a_mask_written_behind_torchs_back_counts(rounds: dict[str, Any]) -> None:
    layer = pruned_once(rounds)
    layer.weight_mask.data[:3] = 1
    other = expected(layer, rounds)
    prune(layer, rounds, "then")
    assert torch.equal(layer.weight_mask, other.weight_mask)
    assert torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)


def test_a_mask_in_an_array_of_somebodys_stays_as_it_was(rounds: dict[str, Any]) -> None:
    layer = pruned_once(rounds)
    array = layer.weight_mask.numpy().copy()
    before = array.copy()
    layer.weight_mask = torch.from_numpy(array)
    prune(layer, rounds, "then")
    assert (array == before).all()
    assert not torch.equal(layer.weight_mask, torch.from_numpy(array))


def test_a_mask_that_another_process_may_see_stays_as_it_was(rounds: dict[str, Any]) -> None:
    layer = pruned_once(rounds)
    place = layer.weight_mask.share_memory_().data_ptr()
    prune(layer, rounds, "then")
    assert layer.weight_mask.data_ptr() != place


def test_a_masked_tensor_written_by_hand_is_written_anew(rounds: dict[str, Any]) -> None:
    layer = pruned_once(rounds)
    with torch.no_grad():
        layer.weight.fill_(7)
    prune(layer, rounds, "then")
    assert torch.equal(layer.weight, layer.weight_orig * layer.weight_mask)


@pytest.mark.parametrize(
    "again",
    [
        lambda layer: pruning.l1_unstructured(layer, "weight", 0.5),
        lambda layer: pruning.global_unstructured([(layer, "weight")], pruning.L1Unstructured, amount=0.5),
        lambda layer: pruning.global_structured([(layer, "weight")], amount=0.5),
    ],
    ids=["alone", "globally", "by channels"],
)
def test_a_round_that_fails_has_overwritten_nothing(again: Callable[[nn.Linear], object]) -> None:
    layer = pruned_once(ROUNDS["half by magnitude"])
    mask, weight = layer.weight_mask.clone(), layer.weight.detach().clone()
    with torch.no_grad():
        layer.weight_orig.view(-1)[layer.weight_mask.view(-1).nonzero()[0]] = float("nan")
    with pytest.raises(ValueError, match="NaN"):
        again(layer)
    assert torch.equal(layer.weight_mask, mask)
    assert torch.equal(layer.weight, weight)
    layer.weight.sum().backward()
    assert torch.equal(layer.weight_orig.grad, mask)


def test_another_default_device_has_no_say(rounds: dict[str, Any]) -> None:
    torch.manual_seed(0)
    layer, other = nn.Linear(60, 70), nn.Linear(60, 70)
    other.load_state_dict(layer.state_dict())
    for which in ("first", "then"):
        prune(other, rounds, which)
        with torch.device("meta"):  # stands for "cuda", which not every machine has
            prune(layer, rounds, which)
    assert torch.equal(layer.weight_mask, other.weight_mask)
    assert torch.equal(layer.weight, other.weight)


def test_a_global_round_overwrites_too_but_not_what_two_modules_share() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Linear(40, 40), nn.Linear(40, 40))
    model[2].weight = model[1].weight
    pairs = [(layer, "weight") for layer in model]
    pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.5)
    other = copy.deepcopy(model)
    watched = [layer.weight_mask for layer in other] + [layer.weight for layer in other]
    first, shared = places(model[0]), model[1].weight_mask.data_ptr()
    pruning.global_unstructured(pairs, pruning.L1Unstructured, amount=0.5)
    pruning.global_unstructured([(layer, "weight") for layer in other], pruning.L1Unstructured, amount=0.5)
    del watched
    assert places(model[0]) == first
    assert model[1].weight_mask is model[2].weight_mask
    assert model[1].weight_mask.data_ptr() != shared
    for ours, theirs in zip(model, other, strict=True):
        assert torch.equal(ours.weight_mask, theirs.weight_mask)
        assert torch.equal(ours.weight, theirs.weight)
