"""Penalty on BatchNorm's scales: its gradient by hand, once a step, before clipping, and errors without such scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import TRAIN, fit, network, problem, same, state

from orchestrator.config.training import Train
from orchestrator.training.loop.training_job import Gradients, TrainingError
from pruning import MaskKeeper, MaskSet, remove_all

LAMBDA = 0.03
ONCE: dict[str, Any] = {"epochs": None, "steps": 1, "batch_size": TRAIN, "lr": 0.5, "momentum": 0.0, "select": "last"}


def signed() -> nn.Sequential:
    """Return a network with scales of both signs and no dropout, so that the batch alone decides the result."""
    model = network()
    model[3] = nn.Identity()
    with torch.no_grad():
        model.get_parameter("1.weight").copy_(torch.linspace(-1, 1, 16).where(torch.arange(16) != 4, 0.0))
    return model


def scales(model: nn.Sequential) -> Tensor:
    return model.get_parameter("1.weight").detach()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the gradients of the mean loss over the whole training split."""
    data = problem().train.take(torch.arange(TRAIN))
    loss = nn.functional.cross_entropy(model(data[0]), data[1])
    names = [name for name, _ in model.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def stepped(penalty: float, clip: float | None = None) -> dict[str, Tensor]:
    """Return the parameters after one step of SGD by hand, on the loss plus penalty times the absolute scales."""
    model = signed()
    found = gradients(model)
    found["1.weight"] = found["1.weight"] + penalty * scales(model).sign()
    norm = torch.cat([each.flatten() for each in found.values()]).norm()
    factor = 1.0 if clip is None else min(1.0, clip / float(norm))
    return {name: p.detach() - 0.5 * factor * found[name] for name, p in model.named_parameters()}


@pytest.mark.parametrize("clip", [None, 0.02])
def test_a_step_is_sgd_with_the_sign_added_before_clipping(clip: float | None) -> None:
    model = signed()
    fit(model, penalty=LAMBDA, clip_norm=clip, **ONCE)

    for name, expected in stepped(LAMBDA, clip).items():
        assert torch.allclose(model.get_parameter(name), expected, atol=1e-6), name
    plain = stepped(0.0, clip)["1.weight"]
    assert not torch.allclose(scales(model), plain, atol=1e-4), "this case must differ from a training without penalty"


def test_a_step_of_several_batches_counts_it_once() -> None:
    """In evaluation mode batches are independent, so two halves equal the whole."""
    halves, whole = signed(), signed()
    for model in (halves, whole):
        model[1].eval()
        model[1].train = lambda _mode=True, norm=model[1]: norm  # type: ignore[method-assign]

    fit(halves, penalty=LAMBDA, **{**ONCE, "batch_size": TRAIN // 2, "accumulate": 2})
    fit(whole, penalty=LAMBDA, **ONCE)

    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(state(halves), state(whole), strict=True))


@pytest.mark.parametrize("clip", [None, 0.02])
def test_it_is_added_to_gradients_that_are_scaled_no_more(clip: float | None) -> None:
    """The scaler multiplies the loss by 1024, as for fp16."""
    model, data = signed(), problem().train.take(torch.arange(TRAIN))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    scaler.scale(nn.functional.cross_entropy(model(data[0]), data[1])).backward()
    gradients = Gradients(Train(penalty=LAMBDA, clip_norm=clip), model, list(model.parameters()), "train")
    gradients.finish(scaler, optimizer)
    scaler.step(optimizer)

    for name, expected in stepped(LAMBDA, clip).items():
        assert torch.allclose(model.get_parameter(name), expected, atol=1e-6), name


def test_scales_shrink() -> None:
    sums = []
    for penalty in (0.0, 0.05):
        model = signed()
        fit(model, penalty=penalty, epochs=20, lr=0.05, select="last")
        sums.append(float(scales(model).abs().sum()))

    assert sums[1] < 0.5 * sums[0]


def test_losses_are_reported_without_it() -> None:
    losses = [fit(signed(), penalty=penalty, **ONCE).curve[0].metrics["train/loss"] for penalty in (0.0, 100.0)]

    assert losses[0] == losses[1]


def test_pruned_scales_stay_0_however_they_are_held() -> None:
    masks = MaskSet({"1.weight": torch.arange(16) % 2 == 0})
    kept, hooked = signed(), signed()
    fit(kept, penalty=LAMBDA, clip_norm=0.1, on_optimizer=MaskKeeper(kept, masks).attach)
    masks.apply(hooked)
    fit(hooked, penalty=LAMBDA, clip_norm=0.1)
    remove_all(hooked)

    assert not scales(kept)[1::2].any()
    assert same(state(kept), state(hooked))


@pytest.mark.parametrize("norm", [None, "frozen", "without a scale"])
def test_a_network_without_trained_scales_is_refused(norm: str | None) -> None:
    model = nn.Sequential(nn.Linear(4, 3), *([] if norm is None else [nn.BatchNorm1d(3, affine=norm == "frozen")]))
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.requires_grad_(False)
    with pytest.raises(
        TrainingError, match=r"`train.penalty` \(=0.1\) must be 0 for a network without trained BatchNorm scales"
    ):
        fit(model, penalty=0.1)
    fit(model, penalty=0.0, epochs=1)


def test_scales_that_a_step_has_not_reached_stay() -> None:
    model = signed()
    model.unused = nn.BatchNorm1d(2)  # type: ignore[assignment]
    model.forward = lambda x: nn.Sequential(*list(model)[:5])(x)  # type: ignore[method-assign]
    fit(model, penalty=LAMBDA, **ONCE)

    assert model.unused.weight.tolist() == [1.0, 1.0]  # type: ignore[union-attr]
