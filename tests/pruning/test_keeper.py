"""A keeper holds a plain model under masks exactly as hooks do, and leaves it plain."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import pruning
from pruning import MaskKeeper, MaskSet


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


def masks_of(model: nn.Module) -> MaskSet:
    pruned = copy.deepcopy(model)
    pruning.l1_unstructured(pruned[0], "weight", amount=0.5)  # type: ignore[index]
    pruning.identity(pruned[2], "weight")  # type: ignore[index]
    return MaskSet.collect(pruned)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, keeper: MaskKeeper | None, clip: float | None) -> None:
    optimizer.zero_grad()
    model(torch.arange(12.0).view(2, 6) / 12).square().sum().backward()
    if clip is not None:
        if keeper is not None:
            keeper.mask_gradients()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    if keeper is not None:
        keeper.enforce()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_kept_model_trains_to_the_bits_of_a_hooked_one(clip: float | None) -> None:
    kept, hooked = network(), network()
    masks = masks_of(kept)
    keeper = MaskKeeper(kept, masks)
    masks.apply(hooked)
    for model, held in ((kept, keeper), (hooked, None)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        for _ in range(4):
            step(model, optimizer, held, clip)
    keeper.release()

    assert torch.equal(kept[0].weight, hooked[0].weight_orig * hooked[0].weight_mask)
    assert torch.equal(kept[2].weight, hooked[2].weight_orig)
    assert torch.equal(kept[2].bias, hooked[2].bias)


def test_release_leaves_a_plain_model_with_its_zeros() -> None:
    model = network()
    names, parameters = list(model.state_dict()), list(model.parameters())
    masks = masks_of(model)
    keeper = MaskKeeper(model, masks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    step(model, optimizer, None, None)
    keeper.release()

    assert list(model.state_dict()) == names
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert not pruning.is_pruned(model)
    assert not model[0].weight[~masks["0.weight"]].any()
    model[0].weight.data.fill_(1)
    keeper.enforce()
    assert model[0].weight.all(), "nothing is enforced once it is released"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype_and_layout_and_what_is_not_finite(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Conv2d(4, 3, 2)).to(dtype=dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    mask = torch.arange(48).view(3, 4, 2, 2) % 3 != 0
    values = model[0].weight.detach().clone()
    keeper = MaskKeeper(model, MaskSet({"0.weight": mask}))
    with torch.no_grad():
        model[0].weight[~mask] = float("nan")
    keeper.enforce()

    expected: Tensor = torch.where(mask, values, torch.zeros((), dtype=dtype))
    assert torch.equal(model[0].weight, expected)


def test_a_step_that_nobody_masks_is_seen_in_no_later_one() -> None:
    attention = nn.MultiheadAttention(4, 1)  # its out_proj fires no hook
    mask = torch.eye(4) == 1
    keeper = MaskKeeper(attention, MaskSet({"out_proj.weight": mask}))
    inputs = torch.ones(3, 1, 4)
    optimizer = torch.optim.SGD(attention.parameters(), lr=1.0, momentum=0.9)
    for _ in range(3):
        attention(inputs, inputs, inputs)[0].sum().backward()
        optimizer.step()
        keeper.enforce()
        assert not attention.out_proj.weight[~mask].any()


def test_a_parameter_of_two_modules_is_kept_in_both() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    hooked = copy.deepcopy(model)
    masks = MaskSet({"0.weight": torch.eye(6) == 1, "2.weight": torch.ones(6, 6).tril()})
    keeper = MaskKeeper(model, masks)
    masks.apply(hooked)
    for each, held in ((model, keeper), (hooked, None)):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for _ in range(3):
            step(each, optimizer, held, None)
    keeper.release()

    assert model[2].weight is model[0].weight
    assert int(model[0].weight.count_nonzero()) == 6
    for layer in (hooked[0], hooked[2]):
        assert torch.equal(model[0].weight, layer.weight_orig * layer.weight_mask)


def test_masks_of_another_model_are_refused() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"`0\.weight` has the shape"):
        MaskKeeper(model, MaskSet({"0.weight": torch.zeros(2, 2)}))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
