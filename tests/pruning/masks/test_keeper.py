"""A mask keeper trains a plain model to the same weights as hooks do, and leaves it plain."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

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


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 4, clip: float | None = None) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(12.0).view(2, 6) / 12).square().sum().backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()


@pytest.mark.parametrize("clip", [None, 0.1])
def test_a_kept_model_trains_to_the_bits_of_a_hooked_one(clip: float | None) -> None:
    kept, hooked = network(), network()
    masks = masks_of(kept)
    keeper = MaskKeeper(kept, masks)
    masks.apply(hooked)
    for model in (kept, hooked):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
        if model is kept:
            keeper.attach(optimizer)
        train(model, optimizer, clip=clip)
    keeper.release()

    assert torch.equal(kept[0].weight, hooked[0].weight_orig * hooked[0].weight_mask)
    assert torch.equal(kept[2].weight, hooked[2].weight_orig)
    assert torch.equal(kept[2].bias, hooked[2].bias)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
    "Muon": partial(torch.optim.Muon, lr=0.1),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.5, max_iter=3),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_is_pruned_has_no_say_in_a_step(make: Callable[..., torch.optim.Optimizer]) -> None:
    """The reference masks gradients and weights by hand, in the closure too."""
    mask = torch.eye(6).roll(1, 0) + torch.eye(6)
    weights = []
    for keeping in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(6, 6, bias=False)
        optimizer = make(layer.parameters())
        if keeping:
            MaskKeeper(layer, MaskSet({"weight": mask})).attach(optimizer)
        else:
            layer.weight.data *= mask

        def loss(layer: nn.Linear = layer, keeping: bool = keeping) -> Tensor:
            layer.weight.grad = None
            found: Tensor = (layer(torch.arange(12.0).view(2, 6) / 12) - 1).square().sum()
            found.backward()
            if not keeping:
                assert layer.weight.grad is not None
                layer.weight.grad *= mask
            return found

        for _ in range(4):
            optimizer.step(loss)
            if not keeping:
                layer.weight.data *= mask
        weights.append(layer.weight.detach())
        assert torch.equal(layer.weight != 0, mask != 0)

    assert torch.equal(*weights)


def test_sparse_gradients_are_masked_as_they_are_accumulated() -> None:
    torch.manual_seed(0)
    table = nn.Embedding(5, 4, sparse=True)
    mask = torch.arange(20).view(5, 4) % 2
    keeper = MaskKeeper(table, MaskSet({"weight": mask}))
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    keeper.attach(optimizer)
    for _ in range(2):  # gradients accumulate
        table(torch.tensor([1, 1, 3])).sum().backward()
    gradient = table.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert torch.equal(gradient.to_dense(), torch.tensor([[0], [4], [0], [2], [0]]) * mask.float())
    optimizer.step()
    assert torch.equal(table.weight != 0, mask != 0)


def test_dense_gradients_are_left_to_who_asks_for_them() -> None:
    model = network()
    masks = masks_of(model)
    keeper = MaskKeeper(model, masks, "dense")
    model(torch.ones(1, 6)).sum().backward()
    assert model[0].weight.grad[~masks["0.weight"]].any()
    with pytest.raises(ValueError, match=r"`gradients` \(='none'\) must be 'masked' or 'dense'"):
        MaskKeeper(model, masks_of(model), "none")  # type: ignore[arg-type]
    keeper.release()


def test_a_gradient_that_can_be_differentiated_again_is_masked() -> None:
    layer = nn.Linear(3, 1, bias=False)
    MaskKeeper(layer, MaskSet({"weight": torch.tensor([[1, 0, 1]])}))
    with warnings.catch_warnings(action="ignore"):  # torch warns of reference cycles with create_graph=True
        layer(torch.ones(1, 3)).pow(3).sum().backward(create_graph=True)
    gradient = layer.weight.grad
    assert gradient is not None
    (second,) = torch.autograd.grad(gradient.sum(), layer.weight)
    assert second[0, 0] == pytest.approx(12 * float(layer.weight.detach().sum()))
    assert gradient[0, 1] == 0


def test_release_leaves_a_plain_model_with_its_zeros() -> None:
    model = network()
    names, parameters = list(model.state_dict()), list(model.parameters())
    masks = masks_of(model)
    keeper = MaskKeeper(model, masks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    keeper.attach(optimizer)
    train(model, optimizer, steps=1)
    with torch.no_grad():
        model[0].weight.fill_(1)
    keeper.release()

    assert list(model.state_dict()) == names
    assert all(now is before for now, before in zip(model.parameters(), parameters, strict=True))
    assert not pruning.is_pruned(model)
    assert not model[0].weight[~masks["0.weight"]].any()
    with torch.no_grad():
        model[0].weight.fill_(1)
    train(model, optimizer, steps=1)
    keeper.enforce()
    assert model[0].weight.all(), "nothing is enforced once it is released"
    assert model[0].weight.grad[~masks["0.weight"]].any(), "nor are gradients masked"


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
    attention = nn.MultiheadAttention(4, 1)  # its out_proj runs no hooks
    mask = torch.eye(4) == 1
    keeper = MaskKeeper(attention, MaskSet({"out_proj.weight": mask}))
    inputs = torch.ones(3, 1, 4)
    optimizer = torch.optim.SGD(attention.parameters(), lr=1.0, momentum=0.9)
    keeper.attach(optimizer)
    for _ in range(3):
        attention(inputs, inputs, inputs)[0].sum().backward()
        optimizer.step()
        assert not attention.out_proj.weight[~mask].any()


def test_a_parameter_of_two_modules_is_kept_in_both() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6))
    model[2].weight = model[0].weight
    hooked = copy.deepcopy(model)
    masks = MaskSet({"0.weight": torch.eye(6) == 1, "2.weight": torch.ones(6, 6).tril()})
    keeper = MaskKeeper(model, masks)
    masks.apply(hooked)
    for each in (model, hooked):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        if each is model:
            keeper.attach(optimizer)
        train(each, optimizer)
    keeper.release()

    assert model[2].weight is model[0].weight
    assert int(model[0].weight.count_nonzero()) == 6
    for layer in (hooked[0], hooked[2]):
        assert torch.equal(model[0].weight, layer.weight_orig * layer.weight_mask)


def replaced(model: nn.Sequential, how: str) -> None:
    """Replace the parameters of `model`, or convert them, so that masked entries have values."""
    ones = {name: torch.ones_like(value) for name, value in model.state_dict().items()}
    if how == "assign":
        model.load_state_dict(ones, assign=True)
    elif how == "convert":
        model.double()
    elif how == "convert and overwrite":
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        model.double()
        torch.__future__.set_overwrite_module_params_on_conversion(False)
    else:
        model[0].weight = nn.Parameter(ones["0.weight"])


@pytest.mark.parametrize("how", ["assign", "convert", "convert and overwrite", "by hand"])
@pytest.mark.parametrize("attached_before", [False, True])
def test_parameters_that_replace_others_are_kept(how: str, attached_before: bool) -> None:
    model = network()
    masks = masks_of(model)
    keeper = MaskKeeper(model, masks)
    if attached_before:
        replaced(model, how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keeper.attach(optimizer)
    if not attached_before:
        replaced(model, how)
        optimizer.param_groups[0]["params"] = list(model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(torch.ones(1, 6, dtype=model[0].weight.dtype)).sum().backward()
        optimizer.step()
        assert not model[0].weight[~masks["0.weight"]].any()
        if step or attached_before or how == "convert":  # else the first gradient came before the new hook
            assert not model[0].weight.grad[~masks["0.weight"]].any()
    assert model[0].weight[masks["0.weight"]].all()
    keeper.release()
    model(torch.ones(1, 6, dtype=model[0].weight.dtype)).sum().backward()
    assert model[0].weight.grad[~masks["0.weight"]].any(), "gradients are free again"


def test_the_first_step_of_a_parameter_that_replaces_another_is_masked() -> None:
    layer = nn.Linear(6, 6, bias=False)
    mask = torch.eye(6)
    keeper = MaskKeeper(layer, MaskSet({"weight": mask}))
    layer.weight = nn.Parameter(torch.ones(6, 6))
    optimizer = torch.optim.SGD([layer.weight], lr=0.1)
    keeper.attach(optimizer)
    layer(torch.ones(1, 6)).sum().backward()
    assert torch.equal(layer.weight.grad != 0, mask != 0)


def test_a_parameter_that_thaws_has_its_gradient_masked() -> None:
    layer = nn.Linear(6, 6, bias=False)
    layer.weight.requires_grad_(False)
    keeper = MaskKeeper(layer, MaskSet({"weight": torch.eye(6)}))
    layer.weight.requires_grad_(True)
    keeper.attach(torch.optim.SGD([layer.weight], lr=0.1))
    layer(torch.ones(1, 6)).sum().backward()
    assert torch.equal(layer.weight.grad, torch.eye(6))


def test_tied_parameters_may_be_untied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    keeper = MaskKeeper(model, MaskSet({"0.weight": torch.eye(4), "1.weight": torch.ones(4, 4)}))
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()}, assign=True)
    keeper.enforce()
    assert model[0].weight is not model[1].weight
    assert torch.equal(model[0].weight, torch.eye(4))
    assert torch.equal(model[1].weight, torch.eye(4))


def test_a_parameter_that_is_gone_or_of_another_shape_is_named() -> None:
    layer = nn.Linear(3, 2)
    keeper = MaskKeeper(layer, MaskSet({"weight": torch.zeros(2, 3)}))
    layer.weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(ValueError, match=r"`weight` of Linear now has shape \(3, 3\).*shape of its mask, \(2, 3\)"):
        keeper.enforce()
    del layer.weight
    with pytest.raises(ValueError, match="`weight` of Linear is missing"):
        keeper.enforce()


def test_masks_of_another_model_are_refused() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"`0\.weight` has the shape"):
        MaskKeeper(model, MaskSet({"0.weight": torch.zeros(2, 2)}))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def kept_linear() -> tuple[nn.Sequential, MaskKeeper, torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, 3, bias=False))
    mask = torch.tensor([[1.0, 0.0, 1.0, 0.0]]).repeat(3, 1)
    return model, MaskKeeper(model, {"0.weight": mask}), mask


def pruned_gradient(model: nn.Module, mask: torch.Tensor) -> float:
    parameter = next(model.parameters())
    model(torch.ones(2, 4, dtype=parameter.dtype)).sum().backward()
    assert parameter.grad is not None
    return float(parameter.grad[mask == 0].abs().sum())


def test_a_swap_of_tensors_does_not_lose_the_mask_of_gradients() -> None:
    model, keeper, mask = kept_linear()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    keeper.enforce()

    assert pruned_gradient(model, mask) == 0.0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_of_model_and_keeper_goes_on_masking_gradients(copied: Callable[[Any], Any]) -> None:
    model, keeper, mask = kept_linear()
    model, keeper = copied((model, keeper))
    keeper.enforce()

    assert pruned_gradient(model, mask) == 0.0


def test_two_parameters_that_become_one_are_under_both_masks() -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    rows = torch.arange(6)[:, None].expand(6, 6)
    keeper = MaskKeeper(model, {"0.weight": (rows > 3).float(), "1.weight": (rows < 4).float()})
    model[1].weight = model[0].weight
    keeper.enforce()

    assert next(model.parameters()).count_nonzero() == 0


def test_a_copy_of_an_attached_keeper_says_that_no_optimizer_calls_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    keeper = MaskKeeper(model, {"0.weight": torch.eye(3, 4)})
    copy.deepcopy((model, optimizer, keeper))  # not attached: nothing is lost
    keeper.attach(optimizer)
    with pytest.warns(UserWarning, match=r"its copy to none, .* until copy\.attach\(optimizer\)"):
        twin, moved, other = copy.deepcopy((model, optimizer, keeper))
    other.attach(moved)
    twin(torch.ones(2, 4)).sum().backward()
    moved.step()
    assert torch.equal(twin[0].weight != 0, torch.eye(3, 4) != 0)
