"""Low-rank updates under masks: their values, gradients by a plain loop, and a merge that revives nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pruning import LowRankUpdates


class Conv1D(nn.Module):
    """Linear layer with a weight of (inputs, outputs), as in transformers."""

    __module__ = "transformers.pytorch_utils"

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf = outputs
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), Conv1D(4, 5), nn.Linear(4, 3, bias=False))


def masks_for(model: nn.Module, *names: str) -> dict[str, Tensor]:
    """Return masks of about half of the entries, which are zeros in the model from then on."""
    found = {name: torch.rand(model.get_parameter(name).shape) > 0.5 for name in names}
    with torch.no_grad():
        for name, mask in found.items():
            model.get_parameter(name).mul_(mask)
    return found


def updates(model: nn.Module, masks: dict[str, Tensor], **changes: Any) -> LowRankUpdates:
    settings = {"rank": 2, "alpha": 3.0, "generator": torch.Generator().manual_seed(7)}
    return LowRankUpdates(model, masks, **{**settings, **changes})


def test_the_weight_is_the_masked_sum_of_the_weight_and_the_scaled_product() -> None:
    model = network()
    masks = masks_for(model, "0.weight", "2.weight")
    before = copy.deepcopy(model)
    held = updates(model, masks)
    assert held.names == ("0.weight", "2.weight", "3.weight")
    x = torch.randn(7, 6)
    assert torch.equal(model(x), before(x)), "B begins at 0"

    expected = {}
    for index in (0, 2, 3):
        a, b = (getattr(model[index].parametrizations.weight[0], each) for each in "ab")
        assert bool((a.abs() <= a.shape[1] ** -0.5).all())
        with torch.no_grad():
            b.normal_()
        change = (b @ a).T if index == 2 else b @ a
        mask = masks.get(f"{index}.weight", torch.ones(()))
        expected[index] = (before[index].weight + 1.5 * change) * mask
        assert torch.allclose(model[index].weight, expected[index], atol=1e-6)
    outputs = model(x)
    held.merge()

    assert torch.equal(model(x), outputs), "the merged network computes what the trained one did"
    for name, mask in masks.items():
        assert not model.get_parameter(name)[~mask].any()
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in before.named_parameters()]
    assert [type(each) for each in model] == [type(each) for each in before]
    assert all(each.requires_grad for each in model.parameters())


def test_training_is_that_of_a_plain_loop_over_the_factors() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    (mask,) = masks_for(model, "0.weight").values()
    weight, bias = (each.detach().clone() for each in model.parameters())
    held = updates(model, {"0.weight": mask})
    a, b = (each.detach().clone().requires_grad_() for each in model[0].parametrizations.weight[0].parameters())
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    ours = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.05)
    theirs = torch.optim.AdamW([a, b], lr=0.05)
    for _ in range(5):
        for optimizer, outputs in ((ours, model(x)), (theirs, x @ ((weight + 1.5 * b @ a) * mask).T + bias)):
            optimizer.zero_grad()
            F.mse_loss(outputs, y).backward()
            optimizer.step()
    held.merge()

    assert torch.allclose(model[0].weight, (weight + 1.5 * b @ a) * mask, atol=1e-6)
    assert torch.equal(model[0].bias, bias), "what has no update is frozen"
    assert not torch.allclose(model[0].weight, weight, atol=1e-2)


def test_shared_weights_and_layers_without_a_match_are_left_alone() -> None:
    model: Any = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    held = updates(model, {})
    assert held.names == ("1.weight",)
    held.merge()

    with pytest.raises(ValueError, match=r"`targets` \(=\['2.*'\]\) must match .* but the network has 1\.weight\."):
        updates(model, {}, targets=["2.*"])
    with pytest.raises(ValueError, match=r"`nosuch\.weight` is in the masks"):
        updates(model, {"nosuch.weight": torch.ones(2)})
    assert all(each.requires_grad for each in model.parameters())
    assert updates(model, {}, targets=["2.*", "1.*"]).names == ("1.weight",)


def test_under_autocast_the_weight_is_the_one_that_is_merged() -> None:
    model = network()
    updates(model, {})
    with torch.no_grad():
        model[0].parametrizations.weight[0].b.normal_()
    plain = model[0].weight

    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model[0].weight, plain)
