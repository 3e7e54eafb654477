"""Later rounds use the current parameter and mask, and do not change tensors that other code still holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import pruning


def pruned_once(seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return pruning.l1_unstructured(nn.Linear(60, 50), "weight", 0.9)


def edited(layer: nn.Linear) -> nn.Linear:
    layer.weight_mask[0].fill_(1)
    return layer


def edited_behind_torchs_back(layer: nn.Linear) -> nn.Linear:
    layer.weight_mask.numpy()[:, 3] = 0
    layer.weight_mask.data[4] = 1
    return layer


def given_another_state(layer: nn.Linear, **how: bool) -> nn.Linear:
    layer.load_state_dict(pruned_once(seed=1).state_dict(), **how)
    return layer


def pruned_by_a_mask(layer: nn.Linear) -> nn.Linear:
    return pruning.custom_from_mask(layer, "weight", torch.arange(3000).view(50, 60) % 2)


CHANGES: dict[str, Callable[[nn.Linear], nn.Linear]] = {
    "edited": edited,
    "edited behind torch's back": edited_behind_torchs_back,
    "another state": given_another_state,
    "another state, assigned": lambda layer: given_another_state(layer, assign=True),
    "a mask": pruned_by_a_mask,
    "double": nn.Module.double,
    "bfloat16": nn.Module.bfloat16,
    "shared memory": nn.Module.share_memory,
    "a copy": copy.deepcopy,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_round_ranks_what_is_there_now(change: Callable[[nn.Linear], nn.Linear]) -> None:
    layer = change(pruned_once())
    kept, values = layer.weight_mask != 0, layer.weight_orig.detach().clone()
    ranking = values.abs().masked_fill(~kept, torch.inf).flatten().argsort(stable=True)
    kept.view(-1)[ranking[: round(0.2 * int(kept.sum()))]] = False

    pruning.l1_unstructured(layer, "weight", 0.2)

    assert torch.equal(layer.weight_mask != 0, kept)
    assert torch.equal(layer.weight, values * layer.weight_mask)


WATCHED: dict[str, Callable[[nn.Linear], Any]] = {
    "the mask": lambda layer: layer.weight_mask,
    "its NumPy view": lambda layer: layer.weight_mask.numpy(),
    "the masked tensor": lambda layer: layer.weight.detach(),
    "a shallow copy's": lambda layer: copy.copy(layer).weight,
}


@pytest.mark.parametrize("watch", WATCHED.values(), ids=WATCHED)
def test_what_somebody_holds_stays_as_it_was(watch: Callable[[nn.Linear], Any]) -> None:
    layer = pruned_once()
    watched = watch(layer)
    before = watched.tolist()
    pruning.l1_unstructured(layer, "weight", 0.5)
    assert watched.tolist() == before


def test_a_backward_after_the_round_is_that_of_the_forward_before() -> None:
    layer = pruned_once()
    before = layer.weight_mask.clone()
    loss = layer(torch.ones(1, 60)).sum()
    pruning.l1_unstructured(layer, "weight", 0.5)
    loss.backward()
    assert torch.equal(layer.weight_orig.grad, before)


def test_another_default_device_has_no_say() -> None:
    layer, other = pruned_once(), pruned_once()
    pruning.l1_unstructured(other, "weight", 0.5)
    with torch.device("meta"):  # stands for "cuda", which not every machine has
        pruning.l1_unstructured(layer, "weight", 0.5)
    assert torch.equal(layer.weight_mask, other.weight_mask)
    assert torch.equal(layer.weight, other.weight)
