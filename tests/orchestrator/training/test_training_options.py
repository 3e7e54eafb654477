"""Training options: optimizers, schedules, clipping, precision, losses, and the errors for invalid ones."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import (
    CLASSES,
    CPU,
    EPOCH,
    TRAIN,
    fit,
    job,
    metrics,
    network,
    points,
    problem,
    same,
    settings,
    state,
    task_of,
)

from orchestrator.core.errors import OrchestratorError
from orchestrator.training.loop import training_loop
from orchestrator.training.loop.evaluation import evaluate
from orchestrator.workloads.splits import LoaderSplit, Split, TensorSplit
from pruning import MaskKeeper, MaskSet

HERE = __name__
SCHEDULERS = "torch.optim.lr_scheduler"


def rates(**options: Any) -> list[float]:
    return [point.metrics["lr"] for point in fit(nn.Linear(4, 3), eval_every=1, **options).curve]


def squared(outputs: Tensor, labels: Tensor) -> Tensor:
    """Loss written as a plain function."""
    return ((outputs - torch.eye(3)[labels]) ** 2).mean()


def zero() -> Tensor:
    return torch.zeros(())


def plain_squared() -> Any:
    return squared


class Wrapped(nn.Module):
    """Network that returns its outputs as transformers' models do."""

    def __init__(self, inner: nn.Module, key: str = "logits") -> None:
        super().__init__()
        self.inner, self.key = inner, key

    def forward(self, x: Tensor) -> SimpleNamespace:
        return SimpleNamespace(**{self.key: self.inner(x)})


def test_cosine_fills_its_length_and_steps_each_step() -> None:
    total = 2 * EPOCH
    expected = [0.05 * (1 + math.cos(math.pi * step / total)) for step in range(total)]

    assert rates(scheduler={"_target_": f"{SCHEDULERS}.CosineAnnealingLR", "T_max": None}) == pytest.approx(expected)


def test_a_given_length_is_kept() -> None:
    expected = [0.05 * (1 + math.cos(math.pi * step / 4)) for step in range(5)]

    assert rates(scheduler={"_target_": f"{SCHEDULERS}.CosineAnnealingLR", "T_max": 4})[:5] == pytest.approx(expected)


def test_a_schedule_by_epochs_counts_epochs() -> None:
    step = {"_target_": f"{SCHEDULERS}.StepLR", "step_size": 1, "gamma": 0.1}
    linear = {"_target_": f"{SCHEDULERS}.LinearLR", "start_factor": 1.0, "end_factor": 0.5, "total_iters": None}

    by_epoch = {"scheduler_interval": "epoch", "epochs": None, "steps": 2 * EPOCH + 1}
    assert rates(scheduler=step, **by_epoch) == pytest.approx([0.1] * EPOCH + [0.01] * EPOCH + [0.001])
    # The third epoch has one step: the factor falls from 1 to 1/2 in three scheduler steps.
    assert rates(scheduler=linear, **by_epoch)[::EPOCH] == pytest.approx([0.1, 0.1 * 5 / 6, 0.1 * 4 / 6])


def test_one_cycle_ends_with_its_last_step() -> None:
    found = rates(scheduler={"_target_": f"{SCHEDULERS}.OneCycleLR", "max_lr": 0.4, "total_steps": None})

    assert max(found) == pytest.approx(0.4, rel=0.05)
    assert found[-1] < 1e-3 < found[0]


def test_plateau_follows_the_validation_loss() -> None:
    plateau = {"_target_": f"{SCHEDULERS}.ReduceLROnPlateau", "patience": 0, "factor": 0.5, "threshold": 0.0}

    result = fit(nn.Linear(4, 3), lr=3.0, epochs=6, scheduler=plateau)

    rate, best = 3.0, math.inf
    for point in result.curve:
        assert point.metrics["lr"] == rate
        rate, best = (rate if point.metrics["val/loss"] < best else rate / 2), min(best, point.metrics["val/loss"])
    assert rate < 3.0


def test_gradients_that_a_keeper_masks_do_not_count_in_the_norm() -> None:
    model = network()
    keeper = MaskKeeper(model, MaskSet({n: torch.zeros_like(p) for n, p in model.named_parameters() if n != "4.bias"}))
    before = [p.detach().clone() for p in model.parameters()]

    once = {"lr": 1.0, "momentum": 0.0, "epochs": None, "steps": 1, "batch_size": TRAIN}
    fit(model, clip_norm=1e-3, on_optimizer=keeper.attach, **once)
    moved = [float((p - b).detach().norm()) for p, b in zip(model.parameters(), before, strict=True)]

    assert sum(moved) == pytest.approx(1e-3, rel=1e-3), "gradients of the survivors are clipped to the whole norm"


def test_an_optimizer_that_needs_a_closure_is_refused_before_the_first_step() -> None:
    model = network()
    before = state(model)
    with pytest.raises(
        training_loop.TrainingError, match=r"`train\.optimizer` \(=LBFGS\) must .* closure.*; pass torch"
    ):
        fit(model, optimizer={"_target_": "torch.optim.LBFGS", "lr": 1.0})
    assert same(state(model), before)


@pytest.mark.parametrize("clip", [None, 0.05])
def test_clipping_bounds_the_norm_of_all_gradients_together(clip: float | None) -> None:
    model = nn.Linear(4, 3)
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])

    fit(model, lr=1.0, momentum=0.0, epochs=None, steps=1, batch_size=TRAIN, clip_norm=clip)

    moved = (torch.cat([p.detach().flatten() for p in model.parameters()]) - before).norm().item()
    assert moved == pytest.approx(0.05, rel=1e-4) if clip else moved > 0.1


@pytest.mark.parametrize("target", ["torch.optim.Adam", "torch.optim.AdamW", "torch.optim.RMSprop"])
def test_any_optimizer_by_target(target: str) -> None:
    result = fit(network(), optimizer={"_target_": target, "lr": 0.01}, epochs=5)

    assert result.curve[-1].metrics["val/loss"] < result.curve[0].metrics["val/loss"]


def test_a_loss_by_target_is_trained_and_reported() -> None:
    smoothed = {"_target_": "torch.nn.CrossEntropyLoss", "label_smoothing": 0.2}
    model = nn.Linear(4, 3)

    result = fit(model, loss=smoothed, epochs=None, steps=1)

    with torch.no_grad():
        log = torch.log_softmax(model(points(30, 1).images).double(), 1)
    y = torch.eye(3, dtype=torch.float64)[points(30, 1).labels] * 0.8 + 0.2 / 3
    assert result.curve[0].metrics["val/loss"] == pytest.approx(-(log * y).sum(1).mean().item(), rel=1e-6)
    evaluated = evaluate(
        model, problem().val, CLASSES.with_loss(nn.CrossEntropyLoss(label_smoothing=0.2)), device=CPU
    ).figures
    assert evaluated["loss"] == result.curve[0].metrics["val/loss"]


def test_a_function_in_place_of_the_loss_s_maker_is_told_the_key_that_takes_it() -> None:
    hint = r"; a function \(outputs, labels\) that is the loss itself needs \+train.loss._partial_=true\.$"
    for name, said in (("squared", "TypeError: .* missing 2 .*"), ("zero", r"not a Tensor of shape \(\)")):
        with pytest.raises(OrchestratorError, match=rf"^`train.loss._target_` \(={HERE}.{name}\) .*{said}{hint}"):
            fit(nn.Linear(4, 3), loss={"_target_": f"{HERE}.{name}"})

    taken, made = (
        fit(network(), loss={"_target_": f"{HERE}.{name}", **more})
        for name, more in (("squared", {"_partial_": True}), ("plain_squared", {}))
    )
    assert metrics(taken) == metrics(made)


def test_a_loss_that_is_a_plain_function() -> None:
    model = nn.Linear(4, 3)
    found = evaluate(model, problem().val, CLASSES.with_loss(plain_squared()), device=CPU, batch_size=7).figures

    with torch.no_grad():
        assert found["loss"] == pytest.approx(squared(model(points(30, 1).images), points(30, 1).labels).item())


def test_evaluation_by_hand() -> None:
    """Logits (ln 3, 0) give losses ln(4/3) for class 0 and ln 4 for class 1."""
    model = nn.Linear(1, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[math.log(3)], [0.0]]))
    split = TensorSplit(torch.ones(5, 1), torch.tensor([0, 0, 0, 1, 0]))

    found = evaluate(model, split, CLASSES, device=CPU, batch_size=2).figures

    assert found["accuracy"] == 0.8
    assert found["loss"] == pytest.approx((4 * math.log(4 / 3) + math.log(4)) / 5, rel=1e-6)


def test_evaluation_does_not_depend_on_order_or_kind_of_split() -> None:
    """Outputs are elementwise, so only the summation could differ; losses span over ten orders of magnitude."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(501, 3, generator=generator) * torch.logspace(-6, 10, 501).unsqueeze(1)
    labels = torch.arange(501) % 3
    order = torch.randperm(501, generator=generator)
    splits: list[Split] = [
        TensorSplit(images, labels),
        TensorSplit(images[order], labels[order]),
        TensorSplit(images.flip(0), labels.flip(0)),
        LoaderSplit(torch.utils.data.TensorDataset(images, labels)),
    ]

    found = [evaluate(nn.Identity(), split, CLASSES, device=CPU, batch_size=64) for split in splits]

    assert found[1:] == found[:-1]


def test_evaluation_restores_every_modules_mode_even_when_it_fails() -> None:
    model = network()
    model[1].eval()

    evaluate(model, problem().val, CLASSES, device=CPU)
    assert [module.training for module in model] == [True, False, True, True, True]
    with pytest.raises(RuntimeError):
        evaluate(model, TensorSplit(torch.zeros(2, 9), torch.zeros(2).long()), CLASSES, device=CPU)
    assert [module.training for module in model] == [True, False, True, True, True]


def test_evaluation_draws_nothing_and_moves_no_buffer() -> None:
    model = network()
    before, generator = state(model), torch.get_rng_state()

    first = evaluate(model, problem().val, CLASSES, device=CPU)

    assert first == evaluate(model, problem().val, CLASSES, device=CPU)
    assert all(torch.equal(a, b) for a, b in zip(before, state(model), strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_outputs_with_logits_are_understood() -> None:
    plain, wrapped = network(), Wrapped(network())

    assert metrics(fit(plain)) == metrics(fit(wrapped))
    with pytest.raises(OrchestratorError, match=r"`model` must return .*logits.* not SimpleNamespace"):
        fit(Wrapped(network(), key="hidden"))


def test_bf16_trains_on_the_cpu_and_fp16_is_refused() -> None:
    full, half = metrics(fit(network())), metrics(fit(network(), precision="bf16"))

    assert half != full
    assert half[-1][1]["val/loss"] == pytest.approx(full[-1][1]["val/loss"], rel=0.1)
    with pytest.raises(training_loop.TrainingError, match=r"`train\.precision` \(=fp16\) .* on cpu.* pass bf16"):
        fit(network(), precision="fp16")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": {"_target_": "torch.optim.SDG", "lr": 1}}, ["train.optimizer", "torch.optim.SDG"]),
        ({"optimizer": {"_target_": "torch.optim.SGD", "momentun": 1}}, ["train.optimizer", "momentun"]),
        ({"optimizer": {"_target_": "torch.optim.SGD", "lr": -1}}, ["`train.optimizer.lr` (=-1)", "at least 0"]),
        ({"optimizer": {"lr": 1}}, ["train.optimizer", "_target_"]),
        ({"scheduler": {"_target_": f"{SCHEDULERS}.StepLR"}}, ["train.scheduler", "step_size"]),
        ({"loss": {"_target_": "torch.nn.CrossEntropy"}}, ["train.loss", "torch.nn.CrossEntropy"]),
        ({"steps": 3}, ["train.epochs", "train.steps", "both"]),
        ({"batchsize": 3}, ["train.batchsize", "batch_size"]),
        ({"batch_size": 99, "drop_last": True}, ["train.batch_size", "=99", "50"]),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_sentence(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(OrchestratorError) as caught:
        training_loop.fit(job(network(), task_of(options), settings(**options)))

    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
