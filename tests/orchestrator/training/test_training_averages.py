"""Accumulated batches, weight averages and compiled steps: their values, and zeros where masks are 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training_cases import BATCH, CLASSES, CPU, EPOCH, after_step, fit, metrics, problem, same, state

from orchestrator.training.loop import training_loop
from orchestrator.training.loop.evaluation import evaluate
from orchestrator.training.loop.training_job import Steps
from orchestrator.workloads.splits import TensorSplit
from pruning import MaskKeeper


def plain() -> nn.Sequential:
    """Return a network without dropout or batch normalisation, whose gradients add up over batches."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))


def near(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-6, rtol=1e-5) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("clip", [None, 0.1])
def test_accumulated_batches_are_one_batch_of_all_their_examples(clip: float | None) -> None:
    """50 examples give 6 batches of 8 and one of 2, so steps of 16, 16, 16 and 2, as batches of 16 do."""
    accumulated, whole = plain(), plain()

    few = fit(accumulated, batch_size=8, accumulate=2, clip_norm=clip, select="last")
    many = fit(whole, batch_size=16, clip_norm=clip, select="last")

    assert few.steps == many.steps == 8
    assert near(state(accumulated), state(whole))
    losses = [[point.metrics["train/loss"] for point in result.curve] for result in (few, many)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_batches_without_a_label_that_counts_leave_training_healthy(accumulate: int) -> None:
    """Two in three single-example batches are ignored, so some batches and some steps of two have no label."""
    whole = problem()
    train = whole.train.take(torch.arange(len(whole.train)))
    blank = TensorSplit(train[0], train[1].where(train[1] == 0, -100))

    result = fit(plain(), data=replace(whole, train=blank), batch_size=1, accumulate=accumulate, lr=0.01)

    assert 0 < metrics(result)[-1][1]["train/loss"] < 1


def test_steps_go_on_anywhere_with_the_batches_that_come_next() -> None:
    steps = Steps(problem().train.batches(BATCH, device=CPU, seed=3), 3)  # 7 batches make steps of 3, 3 and 1

    def taken(first: int) -> list[list[float]]:
        found = zip(range(first, 7), steps.after(first), strict=False)
        return [[float(inputs.sum()) for inputs, _ in batches] for _, batches in found]

    assert [len(batches) for batches in taken(0)] == [3, 3, 1] * 2 + [3]
    assert all(taken(first) == taken(0)[first:] for first in range(7))


def averaged_by_hand(decay: float, **options: Any) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Return the averages after the last step and after each epoch, computed from a training without averages."""
    model, averages, kept = plain(), list[Tensor](), list[list[Tensor]]()

    def take() -> None:
        now = [parameter.detach().clone() for parameter in model.parameters()]
        old = averages or now
        averages[:] = [decay * average + (1 - decay) * parameter for average, parameter in zip(old, now, strict=True)]

    fit(
        model,
        select="last",
        on_optimizer=after_step(take),
        on_point=lambda _: kept.append(list(averages)),
        **options,
    )
    return list(averages), kept


def test_averages_are_those_of_the_weights_after_each_step() -> None:
    model = plain()

    result = fit(model, ema=0.8, select="last")

    assert near(state(model), averaged_by_hand(0.8)[0])
    found = evaluate(model, problem().val, CLASSES, device=CPU).figures
    assert result.curve[-1].metrics["val/loss"] == found["loss"]


def test_the_best_averages_are_kept() -> None:
    """A learning rate that spoils the network later makes the averages of an early epoch the best."""
    model = plain()

    result = fit(model, epochs=6, lr=1.5, ema=0.5, monitor="loss")

    losses = [point.metrics["val/loss"] for point in result.curve]
    best = losses.index(min(losses))
    assert best < 5, "this case must select an epoch before the last"
    assert result.best_step == (best + 1) * EPOCH
    assert evaluate(model, problem().val, CLASSES, device=CPU).figures["loss"] == losses[best]
    assert near(state(model), averaged_by_hand(0.5, epochs=6, lr=1.5)[1][best])


def test_averages_do_not_change_what_is_trained() -> None:
    trained: list[list[list[Tensor]]] = []
    for ema in (None, 0.9):
        model, seen = plain(), list[list[Tensor]]()
        fit(model, ema=ema, on_optimizer=after_step(lambda model=model, seen=seen: seen.append(state(model))))
        trained.append(seen)

    assert all(same(*both) for both in zip(*trained, strict=True))


@pytest.mark.parametrize("options", [{"ema": 0.9}, {"ema": 0.9, "accumulate": 3, "clip_norm": 0.1}])
def test_masks_hold_for_averages(options: dict[str, Any]) -> None:
    model = plain()
    mask = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    keeper = MaskKeeper(model, {"0.weight": mask})

    fit(model, on_optimizer=keeper.attach, **options)

    weight = model[0].weight
    assert isinstance(weight, Tensor)
    assert not weight[~mask].any()
    assert weight[mask].all()


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch itself calls it
@pytest.mark.slow  # the compiler takes most of the time
def test_a_compiled_step_trains_as_a_plain_one() -> None:
    compiled, eager = plain(), plain()
    mask = torch.rand(16, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    results = []
    for model, compile in ((compiled, True), (eager, False)):
        keeper = MaskKeeper(model, {"0.weight": mask})
        results.append(fit(model, compile=compile, on_optimizer=keeper.attach))

    assert near(state(compiled), state(eager))
    assert not compiled[0].weight[~mask].any()  # type: ignore[index]
    assert [step for step, _ in metrics(results[0])] == [step for step, _ in metrics(results[1])]


def test_a_step_that_cannot_be_compiled_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.exc import TorchDynamoException

    def failing(_function: object) -> Any:
        def call(*_: object) -> None:
            raise TorchDynamoException("no C++ compiler")

        return call

    monkeypatch.setattr(torch, "compile", failing)

    with pytest.raises(training_loop.TrainingError, match=r"^torch\.compile failed with .*no C\+\+ compiler.*false"):
        fit(plain(), compile=True)
