"""Dynamics with unusual optimizers and starts: fused, maximising, LBFGS, several; and what is refused at the start."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_plain_loops import batches, drawn, masks, network, optimizer, trained
from torch import Tensor, nn

import pruning
from pruning.dynamics import Dynamics

BATCH = batches(1)[0]


def ones() -> dict[str, Tensor]:
    return {name: torch.ones_like(mask) for name, mask in masks(1.0).items()}


def loss(model: nn.Module) -> Tensor:
    return nn.functional.cross_entropy(model(BATCH[0]), BATCH[1])


@pytest.mark.parametrize("name", ["movement", "sr_ste", "rigl"])
def test_a_fused_optimizer_gives_the_masks_without_a_scaler(name: str) -> None:
    found = []
    for scale in (None, 2.0**10):
        model = network().float()
        steps = torch.optim.Adam(model.parameters(), 1e-2, fused=True)
        options = {"movement": {"sparsity": 0.5, "every": 2}, "rigl": {"every": 2}}.get(name, {})
        dynamics = getattr(pruning.dynamics, name)(**options)
        begun = ones() if name != "rigl" else masks(0.5)
        dynamics.attach(model, begun, steps, length=8)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for number in range(9):
            overflows = scale is not None and number == 3
            if number == 3 and not overflows:
                continue
            steps.zero_grad()
            value = nn.functional.cross_entropy(model(BATCH[0].float()), BATCH[1])
            scaler.scale(value * float("inf") if overflows else value).backward()
            scaler.step(steps)
            scaler.update()
        assert dynamics.step == 8
        found.append((dynamics.masks, model.state_dict()))
    assert found[0][0] == found[1][0]
    for key, value in found[0][1].items():
        assert torch.allclose(value, found[1][1][key], atol=1e-4)


@pytest.mark.parametrize("name", ["movement", "sr_ste"])
def test_maximising_the_negative_loss_is_minimising(name: str) -> None:
    found = []
    for sign in (1, -1):
        model = network()
        steps = torch.optim.SGD(model.parameters(), 0.1, maximize=sign < 0)
        options = {"sparsity": 0.5, "every": 2} if name == "movement" else {"decay": 0.5}
        dynamics = getattr(pruning.dynamics, name)(**options)
        dynamics.attach(model, ones(), steps, length=10)
        for _ in range(10):
            steps.zero_grad()
            (sign * loss(model)).backward()
            steps.step()
        found.append((dynamics.masks, dynamics.own_state()))
    assert found[0][0] == found[1][0]
    assert str(found[0][1]) == str(found[1][1])


@pytest.mark.parametrize("name", ["gradual", "set", "rigl"])
def test_lbfgs_computes_with_masked_weights_only(name: str) -> None:
    model = network()
    steps = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=5)
    options: dict[str, Any] = {"gradual": {"sparsity": 0.8, "every": 2}}.get(name, {"every": 2})
    dynamics = getattr(pruning.dynamics, name)(**options)
    dynamics.attach(model, ones() if name == "gradual" else masks(0.5), steps, length=20, generator=drawn(0))

    def closure() -> float:
        for key, mask in dynamics.masks.items():
            assert not model.get_parameter(key)[~mask].any()
        steps.zero_grad()
        value = loss(model)
        value.backward()
        return float(value.detach())

    for _ in range(20):
        steps.step(closure)
    assert len(dynamics.updates) > 4


def test_a_step_that_fails_leaves_straight_through_whole() -> None:
    (model, other), found = (network(), network()), []
    for each, fails in ((model, True), (other, False)):
        steps, dynamics = optimizer("sgd", each), pruning.dynamics.sr_ste(decay=0.1)
        dynamics.attach(each, ones(), steps, length=10)
        for number in range(4):
            steps.zero_grad()
            if fails and number == 2:
                dynamics.before()
                for name, kept in dynamics.kept.items():
                    each.get_parameter(name).detach().masked_fill_(~kept, 0)
            loss(each).backward()
            if fails and number == 3:
                gradients = [parameter.grad.clone() for parameter in each.parameters()]  # type: ignore[union-attr]
                dynamics.before()
                for parameter, gradient in zip(each.parameters(), gradients, strict=True):
                    parameter.grad = gradient
            steps.step()
        found.append(dynamics.own_state())
    assert str(found[0]) == str(found[1])


def test_averages_lose_dropped_entries_under_any_wrapper() -> None:
    model, dynamics = network(), pruning.dynamics.rigl(every=2)
    averaged, steps = torch.optim.swa_utils.AveragedModel(model), optimizer("sgd", model)
    dynamics.attach(model, masks(0.5), steps, length=20)
    trained(dynamics, model, steps, batches(5))
    dynamics.mask(dict(averaged.named_parameters()))
    for name, mask in dynamics.masks.items():
        assert not averaged.module.get_parameter(name)[~mask].any()
    with pytest.raises(ValueError, match=r"must have a masked parameter, such as first\.weight"):
        dynamics.mask({"other": torch.ones(2)})


def test_first_masks_hold_and_dense_layers_stay_dense() -> None:
    model, given = network(), masks(0.5)
    steps, soft = optimizer("sgd", model), pruning.dynamics.soft_movement(rate=1e-6)
    soft.attach(model, given, steps, length=20)
    trained(soft, model, steps, batches(3))
    assert all(torch.equal(soft.masks[name], mask) for name, mask in given.items())

    model = network()
    steps, moving = optimizer("sgd", model), pruning.dynamics.set(every=1)
    moving.attach(model, {**given, "second.weight": ones()["second.weight"]}, steps, length=20, generator=drawn(0))
    trained(moving, model, steps, batches(3))
    assert moving.masks["second.weight"].all()
    assert not torch.equal(moving.masks["first.weight"], given["first.weight"])


def test_a_rare_update_is_always_recorded() -> None:
    model, dynamics = network(), pruning.dynamics.movement(0.9, every=15, until=60)
    steps = optimizer("sgd", model)
    dynamics.attach(model, ones(), steps, length=2000)
    trained(dynamics, model, steps, batches(61))
    assert [update.step for update in dynamics.updates] == [15, 30, 45, 60]
    assert dynamics.updates[-1].kept == sum(dynamics.masks.kept().values())


def refused(dynamics: Dynamics, said: str, given: dict[str, Tensor] | None = None, **options: Any) -> None:
    model = options.pop("model", None) or network()
    before = {name: each.clone() for name, each in model.state_dict().items()}
    steps = options.pop("optimizer", None) or optimizer("sgd", model)
    with pytest.raises(ValueError, match=said):
        dynamics.attach(model, given or masks(0.5), steps, length=20, **options)
    assert not dynamics.is_attached
    assert all(not parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    assert set(before) == set(model.state_dict())


def test_starts_that_cannot_work_are_refused() -> None:
    make = pruning.dynamics
    for begin, until in ((10, 10), (15, 10), (0, 0), (0, 0.01), (0, 21)):
        refused(make.rigl(begin=begin, until=until), r"`until` \(=.*\) must lie after `begin`")
        refused(make.movement(0.5, begin=begin, until=until), r"must lie after `begin`")
    model = network()
    half = torch.optim.SGD(model.second.parameters(), 0.1)
    refused(make.rigl(), r"`first\.weight` is masked, but is no parameter of `optimizer`", model=model, optimizer=half)
    model = network()
    pruning.l1_unstructured(model.first, "weight", amount=0.5)
    for name in ("first.weight", "first.weight_orig"):
        refused(make.rigl(), "is pruned by hooks; take its masks", {name: ones()["first.weight"]}, model=model)
    refused(make.gradual(0.3), r"the first masks \(of sparsity 0\.\d+\) do not fit the method")
    uneven = {"first.weight": masks(0.9)["first.weight"], "second.weight": masks(0.1)["second.weight"]}
    refused(make.gradual(0.5), r"do not fit the method: .*scope='global'", uneven)
    with pytest.raises(TypeError, match=r"`batches` \(an iterator\)"):
        make.gradual(0.5, batches=iter([BATCH]))


def test_a_state_of_another_training_is_refused() -> None:
    def state(dynamics: Dynamics, **options: Any) -> dict[str, Any]:
        model = network()
        dynamics.attach(model, masks(0.5), optimizer("sgd", model), length=20, **options)
        return dynamics.state()

    make = pruning.dynamics
    refused(make.set(every=2), "`state` belongs to RigL", state=state(make.rigl()))
    refused(make.rigl(), "training with a generator", state=state(make.rigl(), generator=drawn(0)))
    refused(make.rigl(), "training without a generator", state=state(make.rigl()), generator=drawn(0))
